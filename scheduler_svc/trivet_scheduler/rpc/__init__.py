"""The scheduler's gRPC face: sessions of frontends, attached workers, unary calls. Wire to domain and back."""
