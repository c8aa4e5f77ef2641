"""Small models of fixed weights, which the digest of results runs (runtime/digest.py): every op of the op table with
every attribute.
"""
