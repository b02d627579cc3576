"""torch.compile: GEMMs with the pointwise nodes behind them become our choices where these are faster.

``backend`` is what users and ``gemmtune.optimize`` call; ``rewriting`` the pass, which goes node by node through ``products``
(which nodes are GEMMs), ``tails`` (what is behind them), a judge (``judging``, ``verdicts``, ``variants``) and ``planned`` (what is
called instead, which ``lowering`` teaches Inductor). ``report`` keeps what was decided.
"""
