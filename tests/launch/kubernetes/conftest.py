"""Makes the documentation's generators importable: they know which metrics there are."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
