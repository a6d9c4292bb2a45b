"""Symbolic dimensions: expressions, proofs about them, and run-time guards."""
from pliant.sym.expr import *
