"""Serving models over HTTP and gRPC: the Open Inference Protocol (KServe V2), with dynamic batching.

    tcomp serve models/ --port 8000 --grpc-port 8001

or, in a program, `tcomp.serve.server.run_server(ServerOptions(Path("models")))`. It needs the packages of the extra `tcomp[serve]`, and of
tcomp the runtime, and `tcomp.generation`. A request comes in by `http_app`, or by `grpc.server` and `grpc.service`, which make arrays of it
(`wire`); a `ServedModel` of the `repository` puts it in the queue of its `batching.Batcher`, whose threads run the model. Texts of language
models have a protocol and a queue of their own: `text`.
"""
