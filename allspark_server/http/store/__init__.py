"""What the HTTP server keeps: responses, files and batches, in SQLite or in a database that SQLAlchemy knows."""

from .database import open_database
from .store import Store, Stored

__all__ = ["Store", "Stored", "open_database"]
