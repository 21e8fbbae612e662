"""JAX: a small network in training, compiled, and some arithmetic that is not.

    jax_training.py [waits]        waits for the GPU before arrays are released, as XLA itself does for what
                                   its allocator `platform` has put up
"""

import sys

import jax
import jax.numpy as jnp
from loop import timed

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


# XLA waits because memory that is unmapped under a kernel fails it: no allocator can save that.
settled = jax.block_until_ready if sys.argv[1:] == ["waits"] else lambda arrays: arrays


def body(scale):
    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    weights = [
        jax.random.normal(key, (a, b)) / jnp.sqrt(a) for key, a, b in zip(keys, SIZES, SIZES[1:])
    ]
    rows = 256 * scale
    x, y = jax.random.normal(keys[3], (rows, 256)), jax.random.normal(keys[4], (rows, 64))
    for number in range(60):
        value, weights = settled(step(weights, x, y))
        x = settled(x + 0.001 * number)
    return float(value)


print(f"sum: ~{timed(body):.6f}")
