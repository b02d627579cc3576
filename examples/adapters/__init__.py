"""GEMMs of other packages, each called as its own documentation says: one module for a package, which only that module imports.

    cd examples; gemmtune conformance adapters.torch_ops:dense --device cuda

What an adapter declares is what the package documents. Where it documents nothing, nothing is declared: then it may refuse, but not
be wrong. gemlite is missing because it multiplies by quantized weights only, which is none of the operations here.
"""
