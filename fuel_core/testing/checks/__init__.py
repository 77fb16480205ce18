"""The checks, one file per topic. `registry.MANIFEST` lists them; docs/conformance.md explains them."""
