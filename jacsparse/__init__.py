from pathlib import Path as _Path
if (_Path(__file__).parent.parent/"setup.cfg").exists(): __path__.append(str(_Path(__file__).parent.parent))
