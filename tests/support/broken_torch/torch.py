"""A torch that is installed and cannot be imported, as where a library of CUDA is missing."""

raise ImportError("libcudart.so.13: cannot open shared object file: No such file or directory")
