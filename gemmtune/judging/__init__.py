"""The judge: is this GEMM right, is its speed real, and what else does it do?

``verdict`` judges, ``values`` has the suite's cases, ``calls`` the timed calls, ``report`` the text and the page.
"""
