"""``python -m fuel_core.native``: build the kernels now and wait for it, so that the next process starts with them."""

from fuel_core.native import build

if __name__ == "__main__":
    build.shared_object(patience=None)
    print(build.status())
