"""HTTP: the application, its connections, bodies, events and documents."""
