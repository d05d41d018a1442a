"""The messages of the Open Inference Protocol, version 2, for gRPC.

They are those of https://github.com/kserve/open-inference-protocol (grpc_predict_v2.proto), of its model repository extension, and of
Triton's for configurations and statistics (the fields that are filled; enumerations are numbers), described here field by field and built
when this module is loaded: code that protoc generates only works with some versions of protobuf. They live in a
pool of their own, beside those of clients in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"

# Message -> fields: number, type, name. `*` means repeated, `map` a map from strings, `|` a member of the message's only oneof.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 string name, 2 string version, 3 string* extensions",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse": "1 string name, 2 string* versions, 3 string platform, 4 .TensorMetadata* inputs, 5 .TensorMetadata* outputs",
    "ModelMetadataResponse.TensorMetadata": "1 string name, 2 string datatype, 3 int64* shape",
    "ModelConfigRequest": "1 string name, 2 string version",
    "ModelConfigResponse": "1 ModelConfig config",
    "ModelConfig": "1 string name, 2 string platform, 4 int32 max_batch_size, 5 .ModelInput* input, 6 .ModelOutput* output, "
    "7 .ModelInstanceGroup* instance_group, 11 .ModelDynamicBatching dynamic_batching",
    "ModelConfig.ModelInput": "1 string name, 2 int32 data_type, 4 int64* dims",
    "ModelConfig.ModelOutput": "1 string name, 2 int32 data_type, 3 int64* dims",
    "ModelConfig.ModelInstanceGroup": "1 string name, 2 int32 count, 4 int32 kind",
    "ModelConfig.ModelDynamicBatching": "1 int32* preferred_batch_size, 2 uint64 max_queue_delay_microseconds",
    "ModelStatisticsRequest": "1 string name, 2 string version",
    "ModelStatisticsResponse": "1 ModelStatistics* model_stats",
    "ModelStatistics": "1 string name, 2 string version, 4 uint64 inference_count, 5 uint64 execution_count, "
    "6 InferStatistics inference_stats",
    "InferStatistics": "1 StatisticDuration success, 2 StatisticDuration fail, 3 StatisticDuration queue, "
    "4 StatisticDuration compute_input, 5 StatisticDuration compute_infer, 6 StatisticDuration compute_output",
    "StatisticDuration": "1 uint64 count, 2 uint64 ns",
    "InferParameter": "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, 4 double| double_param, 5 uint64| uint64_param",
    "InferTensorContents": "1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents, 4 uint32* uint_contents, "
    "5 uint64* uint64_contents, 6 float* fp32_contents, 7 double* fp64_contents, 8 bytes* bytes_contents",
    "ModelInferRequest": "1 string model_name, 2 string model_version, 3 string id, 4 map InferParameter parameters, "
    "5 .InferInputTensor* inputs, 6 .InferRequestedOutputTensor* outputs, 7 bytes* raw_input_contents",
    "ModelInferRequest.InferInputTensor": "1 string name, 2 string datatype, 3 int64* shape, 4 map InferParameter parameters, "
    "5 InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 map InferParameter parameters",
    "ModelInferResponse": "1 string model_name, 2 string model_version, 3 string id, 4 map InferParameter parameters, "
    "5 .InferOutputTensor* outputs, 6 bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "1 string name, 2 string datatype, 3 int64* shape, 4 map InferParameter parameters, "
    "5 InferTensorContents contents",
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
    "RepositoryIndexRequest": "1 string repository_name, 2 bool ready",
    "RepositoryIndexResponse": "1 .ModelIndex* models",
    "RepositoryIndexResponse.ModelIndex": "1 string name, 2 string version, 3 string state, 4 string reason",
    "ModelRepositoryParameter": "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, 4 bytes| bytes_param",
    "RepositoryModelLoadRequest": "1 string repository_name, 2 string model_name, 3 map ModelRepositoryParameter parameters",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "1 string repository_name, 2 string model_name, 3 map ModelRepositoryParameter parameters",
    "RepositoryModelUnloadResponse": "",
}


_PLAIN = frozenset(descriptor_pb2.FieldDescriptorProto.Type.keys())  # as in TYPE_STRING


def _add_field(message: descriptor_pb2.DescriptorProto, full_name: str, text: str) -> None:
    number, kind, name = text.split()
    types = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=int(number), label=types.LABEL_OPTIONAL)
    if kind.endswith("*"):
        field.label = types.LABEL_REPEATED
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    kind = kind.rstrip("*|")
    if f"TYPE_{kind.upper()}" in _PLAIN:
        field.type = types.Type.Value(f"TYPE_{kind.upper()}")
        return
    field.type = types.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{full_name}{kind}" if kind.startswith(".") else f".{PACKAGE}.{kind}"


def _add_map(message: descriptor_pb2.DescriptorProto, full_name: str, text: str) -> None:
    """A map is a repeated message with a key and a value."""
    number, _, value, name = text.split()
    entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
    entry.options.map_entry = True
    _add_field(entry, full_name, "1 string key")
    _add_field(entry, full_name, f"2 {value} value")
    _add_field(message, full_name, f"{number} .{entry.name}* {name}")


def _build() -> dict[str, Any]:
    """The classes of all messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="tcomp/inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for full_name, fields in _MESSAGES.items():
        outer, _, name = full_name.rpartition(".")
        message = made[full_name] = made[outer].nested_type.add(name=name) if outer else file.message_type.add(name=name)
        for text in filter(None, fields.split(", ")):
            (_add_map if text.split()[1] == "map" else _add_field)(message, full_name, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES}


MESSAGES = _build()
