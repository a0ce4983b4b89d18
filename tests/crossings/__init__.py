"""A capability is done when it is done with the others.

The table (`table.py`) has an entry for each capability: how it is switched on, the settings and fields that it covers,
what it needs and what it explains. `refusals.py` has the pairs that are refused, with the words. The suite

- compares the table with the fields of settings and requests, so that a new one without an entry fails (`test_table`);
- checks that every refused pair is refused, in those words, before anything is served, and that all others of settings
  are not (`test_refusals`);
- draws sets that have every pair together, and larger ones by chance, and runs a crowd of requests through the real
  engine and its driver on the fake executor (`test_fake_engines`);
- does the same once with tiny models, whose answers are compared with those of a plain engine (`test_tiny_models`).

- has a crowd of clients ask servers of a tiny model, made with sets of these capabilities, in every API
  (`test_servers`): their answers are those of a plain server.

Whatever is crossed, the assertions are the same (`crossing.py`): every request ends; tokens are those of the plain run;
pages, slots, adapters, snapshots and pages of the host are back; nothing in the log is above INFO but what an entry
explains.

An entry is one of five kinds (`capability.py`), by what switches it on:

- `Layout`: the kind of model (`layouts.py`), with its page groups for the fake executor and a config for tiny models;
- `EngineSetting` (`engine_settings.py`): its `switch_on` changes an `EngineSetup`, and its `config` has the settings by
  which users have it;
- `RequestField` (`request_fields.py`): changes a `RequestDraft`;
- `Incident` (`incidents.py`): has something done to the `Crossing` at some turn, or makes steps fail;
- `ServerCapability` (`server_capabilities.py`): what stands in front of engines. It has the `config` of servers that
  cross it, a `strike` that happens to their processes while requests run, or clients that leave.

A bench (`bench.py`) makes the engines and knows the answers: a suite with another kind of engine brings its own.

A set that fails is made smaller, to a pair where that is possible, and the line is printed that runs it again:

    python -m tests.crossings --seed 7 "longrope" "few pages" "forced tokens"
"""
