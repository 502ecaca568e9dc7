"""From a deployment type to supervised worker processes. Free of torch."""
