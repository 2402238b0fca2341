"""One step, in order: update states → inputs → forward → sample → reply. Synchronous; the link feeds it."""
