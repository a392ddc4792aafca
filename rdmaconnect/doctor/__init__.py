"""What is wrong with this host, or with this pair of hosts: the makings of ``rdmaconnect doctor``.

``gather`` reads the world once, into a :class:`Host`; the checks judge that value, each a small pure
function, and give :class:`Finding`; ``visit`` tries every way to another host, where ``serve`` runs;
``report`` puts all of it in words, or in JSON.
"""

from __future__ import annotations

from .checks import examine
from .finding import Finding, Verdict
from .gather import gather
from .host import Host
from .matrix import Attempt, Matrix
from .pair import Visit, visit
from .service import serve

__all__ = ["Attempt", "Finding", "Host", "Matrix", "Verdict", "Visit", "examine", "gather", "serve", "visit"]
