"""JAX → Graph: jaxprs, as `jax.jit(f).trace` makes them. Needs JAX."""

from tcomp.frontends.jax.importer import Imported, import_jaxpr, import_traced, trace

__all__ = ["Imported", "import_jaxpr", "import_traced", "trace"]
