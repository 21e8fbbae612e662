"""JAX: a small network in training, compiled, and some arithmetic that is not.

With newer releases of JAX the allocator `platform` takes each piece of memory by cuMemCreate, unless
XLA is told otherwise; here it is, so that it is cuMemAlloc and cuMemFree, as before.
"""

import importlib.util
import mmap
import os
import pathlib

from loop import timed

WITHOUT_MAPPING = "xla_gpu_experimental_vmm_disabled"


def knows(flag):
    """Whether XLA has a flag: one that it does not know ends the process."""
    spec = importlib.util.find_spec("jax_plugins")
    for place in spec.submodule_search_locations if spec else []:
        for plugin in pathlib.Path(place).glob("xla_cuda*/xla_cuda_plugin.so"):
            with open(plugin, "rb") as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                    return text.find(flag.encode()) >= 0
    return False


if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform" and knows(WITHOUT_MAPPING):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{WITHOUT_MAPPING}=true"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")
SIZES = [256, 512, 512, 64]


def network(weights, x):
    for w in weights[:-1]:
        x = jnp.tanh(x @ w)
    return x @ weights[-1]


def loss(weights, x, y):
    return jnp.mean((network(weights, x) - y) ** 2)


@jax.jit
def step(weights, x, y):
    value, slopes = jax.value_and_grad(loss)(weights, x, y)
    return value, [w - 0.05 * slope for w, slope in zip(weights, slopes)]


def body(scale):
    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    weights = [
        jax.random.normal(key, (a, b)) / jnp.sqrt(a) for key, a, b in zip(keys, SIZES, SIZES[1:])
    ]
    rows = 256 * scale
    x, y = jax.random.normal(keys[3], (rows, 256)), jax.random.normal(keys[4], (rows, 64))
    for number in range(60):
        value, weights = step(weights, x, y)
        x = x + 0.001 * number
    return float(value)


print(f"sum: ~{timed(body):.6f}")
