"""Verifiers: the invariants of expressions, tensor expressions, loop programs, graphs and host programs between passes.

Each raises `IRError` that names the place and the rule. They check types, scopes, ranges that later proofs rely on, and
accesses that are out of range for certain; they do not prove accesses in range.
"""
