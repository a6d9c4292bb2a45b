"""What of torch compiles, as scorecards: `python -m bench.coverage CARD`.

    opinfo          every OpInfo of torch.testing
    coreaten        every overload that torch tags as core
    architectures   models of timm, transformers and diffusers

Every entry of a fixed list is compiled with every dim dynamic and compared with eager;
there is no fallback. Each is judged in a process that may crash or hang without harm
(pool.py), and each failure is reported by name and reason (report.py):

    pass            eager's results, within the error bound of judge.py
    wrong           other results
    unsupported     UnsupportedOpError: an op, or a form of one, without translation
    refused         another typed error, for the example itself
    internal        InternalError, or an exception that is none of Pliant's
    crash, hang     the process ended, or took longer than the limit
    export_cannot   torch.export itself does not trace the entry
    eager_cannot    the entry does not run in eager either
"""
