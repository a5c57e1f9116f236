"""What the tests of several folders share. Files here import little: workers and scenarios import some of them, too."""
