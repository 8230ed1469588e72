"""Linear attention: gated delta rules (GDN, KDA) and selective state spaces (Mamba-2)."""
