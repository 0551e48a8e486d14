"""The stage contract, and what it needs: outputs, the store, locks, and the identity of code."""
