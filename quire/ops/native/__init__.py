"""Operations in C++, built on the machine they run on. Every one has a plain-jnp form that runs where there is none."""
