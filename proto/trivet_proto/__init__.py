"""The contracts between Trivet's services: generated stubs (`v1`) and the few plain types both ends must agree on."""
