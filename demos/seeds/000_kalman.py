"""Seed 000: a Kalman filter's update on two ranks, whose messages find their order by themselves.

Rank 0 updates the mean, rank 1 the covariance, for which it needs four matrices of rank 0. The program says what is
sent, not when: operations are ordered so that messages travel while both ranks compute. First for functions of NumPy,
then, where PyTensor is installed, for the program with which M. Rocklin showed such an order in Theano in 2012
(https://gist.github.com/mrocklin/3750410): its imports are changed, and there is a function around it.

Do not expect it to be fast. What leads to the covariance takes 10.67 of the 11.33 n^3 operations, one after the other;
only the factors for the mean are computed beside it. So two ranks can save 6 % at most. It shows the order.

Run: python demos/seeds/000_kalman.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from typing import Any

import numpy as np
from dataflow import flow, recv, send

import synk

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: for tests")
N = {"small": 40, "full": 500}[parser.parse_args().size]
INPUTS = ("mu", "Sigma", "H", "R", "data")
RESULTS = ("first", "first", None, "max")  # the mean and the covariance of rank 0; what each rank has run; seconds


def serial(mu: Any, Sigma: Any, H: Any, R: Any, data: Any) -> tuple[Any, Any]:
    A = Sigma @ H.T
    B = R + H @ A
    new_mu = mu + A @ np.linalg.solve(B, H @ mu - data)
    new_Sigma = Sigma - A @ np.linalg.solve(B, H) @ Sigma
    return new_mu, new_Sigma


# The same on two ranks.
@flow
def update_mean(mu: Any, Sigma: Any, H: Any, R: Any, data: Any) -> tuple[Any, Any]:
    A = Sigma @ H.T
    B = R + H @ A
    new_mu = mu + A @ np.linalg.solve(B, H @ mu - data)
    for tag, matrix in enumerate((H, B, Sigma, A), 1):
        send(matrix, 1, tag)
    return new_mu, recv(1, 5)


@flow
def update_covariance() -> None:
    H, B, Sigma, A = (recv(0, tag) for tag in (1, 2, 3, 4))
    new_Sigma = Sigma - A @ np.linalg.solve(B, H) @ Sigma
    send(new_Sigma, 0, 5)


def by_numpy(mu: Any, Sigma: Any, H: Any, R: Any, data: Any) -> tuple[Any, Any, str, float]:
    if synk.comm.world_size == 1:
        return *serial(mu, Sigma, H, R, data), "", 0.0
    for _ in range(2):  # the first time memory is touched and the order is found
        synk.comm.barrier()
        start = time.perf_counter()
        if synk.comm.rank == 0:
            new_mu, new_Sigma = update_mean(mu, Sigma, H, R, data)
        else:
            new_mu, new_Sigma = mu, update_covariance() or Sigma
        synk.comm.barrier()
        seconds = time.perf_counter() - start
    trace = (update_covariance if synk.comm.rank else update_mean).trace
    return new_mu, new_Sigma, "\n".join(each.name for each in trace), seconds


def by_pytensor(mu: Any, Sigma: Any, H: Any, R: Any, data: Any) -> tuple[Any, Any, str, float]:
    if synk.comm.world_size == 1:
        return *serial(mu, Sigma, H, R, data), "", 0.0
    import pytensor
    from pytensor.tensor import linalg
    from theano_mpi import mode, recv, send

    dot = pytensor.tensor.dot
    numeric_inputs = (mu, Sigma, H, R, data)
    dtype = mu.dtype.name
    n = len(mu)
    rank = synk.comm.rank
    if rank == 0:
        # Create some input variables
        mu, Sigma, H, R, data = inputs = [pytensor.tensor.matrix(name, dtype=dtype) for name in INPUTS]
        # Some intermediate variables
        A = dot(Sigma, H.T)
        B = R + dot(H, dot(Sigma, H.T))
        new_mu = mu + dot(A, linalg.solve(B, dot(H, mu) - data))
        # Send data to 1
        receipts = send(H, 1, 1), send(B, 1, 2), send(Sigma, 1, 3), send(A, 1, 4)
        # Get back the work that 1 did
        new_Sigma = recv((n, n), dtype, 1, 5)
        f = pytensor.function(inputs, (new_mu, new_Sigma, *receipts), mode=mode())
        values = f(*numeric_inputs)[:2]
    else:
        # Receive some data from 0
        H = recv((n, n), dtype, 0, 1)
        B = recv((n, n), dtype, 0, 2)
        Sigma = recv((n, n), dtype, 0, 3)
        A = recv((n, n), dtype, 0, 4)
        # Do some computation
        new_Sigma = Sigma - dot(dot(A, linalg.solve(B, H)), Sigma)
        # Send it back to 0
        f = pytensor.function((), (send(new_Sigma, 0, 5),), mode=mode())
        f()
        values = numeric_inputs[:2]
    nodes = f.maker.linker.make_all()[-1]
    return *values, "\n".join(str(node.op) for node in nodes), 0.0


# Without a compiler PyTensor uses NumPy and SciPy, and starts at once.
os.environ.setdefault("PYTENSOR_FLAGS", "cxx=")

# Well-conditioned: with random matrices two libraries for linear algebra differ in all digits of float32.
rng = np.random.default_rng(0)
root = rng.standard_normal((N, N))
matrices = {
    "mu": rng.standard_normal((N, 1)),
    "Sigma": root @ root.T / N + np.eye(N),
    "H": rng.standard_normal((N, N)) / N**0.5,
    "R": np.eye(N),
    "data": rng.standard_normal((N, 1)),
}
arguments = [matrix.astype("float32") for matrix in matrices.values()]
expected_mu, expected_Sigma = serial(*matrices.values())


def check(new_mu: Any, new_Sigma: Any) -> None:
    assert np.allclose(new_mu, expected_mu, rtol=1e-3, atol=1e-3)
    assert np.allclose(new_Sigma, expected_Sigma, rtol=1e-3, atol=1e-3)


def show(title: str, orders: list[str]) -> None:
    print(f"\n{title}")
    for rank, order in enumerate(orders):
        print(f"  rank {rank}: " + ", ".join(name.partition("{assume")[0] for name in order.splitlines()))


synk.fork(2, backend="numpy")
timed = synk.function(by_numpy, bcast_inputs=INPUTS, outputs=RESULTS)
*found, orders, seconds = timed(*arguments)
check(*found)
show("NumPy: the order in which each rank has run its operations", orders)
assert orders[0].splitlines()[:3] == ["send to 1 tag 1", "send to 1 tag 3", "recv from 1 tag 5"]
assert orders[0].splitlines()[-1] == "wait recv from 1 tag 5"
assert [name.split()[-1] for name in orders[1].splitlines() if name.startswith("wait recv")] == ["1", "2", "4", "3"]


def alone(mu: Any, Sigma: Any, H: Any, R: Any, data: Any) -> float:
    for _ in range(2):
        start = time.perf_counter()
        serial(mu, Sigma, H, R, data)
        seconds = time.perf_counter() - start
    return seconds


in_one = min(synk.function(alone, bcast_inputs=INPUTS, outputs=None)(*arguments))
print(f"\n{N} x {N}: {1e3 * seconds:.1f} ms on two ranks, {1e3 * in_one:.1f} ms on one; two can save 6 % at most")

if importlib.util.find_spec("pytensor") is None:
    print("\nPyTensor is not installed: its half of this demo was left out.")
else:
    *found, orders, _ = synk.function(by_pytensor, bcast_inputs=INPUTS, outputs=RESULTS)(*arguments)
    check(*found)
    show("PyTensor: the order of the graph's nodes", orders)
    kinds = [[name.partition("{")[0] for name in order.splitlines()] for order in orders]
    assert " ".join(kinds[0]) == (
        "MPISend MPISend MPIRecv MatrixTranspose Dot22 MPISend Gemm MPISend Gemm Solve Gemm "
        "MPISendWait MPISendWait MPISendWait MPISendWait MPIRecvWait"
    )
    assert " ".join(kinds[1]) == (
        "MPIRecv MPIRecv MPIRecv MPIRecv MPIRecvWait MPIRecvWait Solve MPIRecvWait Dot22 MPIRecvWait Gemm "
        "MPISend MPISendWait"
    )

synk.close()
print("All assertions passed.")
