"""A model on several machines, on Ray. Ray places, starts and watches the processes; all calls of Ray are here.

Stages: the layers of one model in several processes (`localllm.cluster`). The process that runs the engine has the
first stage; the others are actors in a placement group with one bundle per stage.

Replicas: a server with replicas keeps templates, texts and the HTTP APIs in one process without weights, the front
(front.py, remote.py). Each replica (replica.py) is a replica of a Serve deployment, with the model and its scheduler.
Requests travel through Serve, and events over a direct connection (direct.py).

Ray and pyzmq come with `pip install 'localllm[ray]'`. They are imported inside functions, when they are used.

May import: all rooms below.
Begin with: attach.py (which cluster), then stages.py for stages, node.py, which runs on each machine, and front.py for
replicas; worker.py makes a cluster.
"""
