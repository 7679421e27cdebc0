from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_STAGE: _ClassVar[Role]
    ROLE_SEED: _ClassVar[Role]
    ROLE_ANCHOR: _ClassVar[Role]

class PeerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_STATE_UNSPECIFIED: _ClassVar[PeerState]
    PEER_STATE_STARTING: _ClassVar[PeerState]
    PEER_STATE_JOINING: _ClassVar[PeerState]
    PEER_STATE_SYNCING: _ClassVar[PeerState]
    PEER_STATE_WORKING: _ClassVar[PeerState]
    PEER_STATE_DRAINING: _ClassVar[PeerState]
    PEER_STATE_FINISHED: _ClassVar[PeerState]

class PriorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIOR_KIND_UNSPECIFIED: _ClassVar[PriorKind]
    PRIOR_KIND_BOUNDARY: _ClassVar[PriorKind]
    PRIOR_KIND_WEIGHTS: _ClassVar[PriorKind]
ROLE_UNSPECIFIED: Role
ROLE_STAGE: Role
ROLE_SEED: Role
ROLE_ANCHOR: Role
PEER_STATE_UNSPECIFIED: PeerState
PEER_STATE_STARTING: PeerState
PEER_STATE_JOINING: PeerState
PEER_STATE_SYNCING: PeerState
PEER_STATE_WORKING: PeerState
PEER_STATE_DRAINING: PeerState
PEER_STATE_FINISHED: PeerState
PRIOR_KIND_UNSPECIFIED: PriorKind
PRIOR_KIND_BOUNDARY: PriorKind
PRIOR_KIND_WEIGHTS: PriorKind

class RecordEnvelope(_message.Message):
    __slots__ = ("record", "public_key", "signature")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, record: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("run_id", "peer_id", "name", "role", "stage", "state", "address", "maddrs", "protocol", "incarnation", "version", "weight_version", "tokens_per_s", "expires", "committed", "claimed", "capacity_tokens_per_s", "memory_bytes", "pinned", "moving_to", "moving_since")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MADDRS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MOVING_TO_FIELD_NUMBER: _ClassVar[int]
    MOVING_SINCE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    peer_id: str
    name: str
    role: Role
    stage: int
    state: PeerState
    address: str
    maddrs: _containers.RepeatedScalarFieldContainer[str]
    protocol: int
    incarnation: int
    version: int
    weight_version: int
    tokens_per_s: float
    expires: float
    committed: _containers.RepeatedCompositeFieldContainer[Count]
    claimed: float
    capacity_tokens_per_s: float
    memory_bytes: int
    pinned: bool
    moving_to: int
    moving_since: float
    def __init__(self, run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., stage: _Optional[int] = ..., state: _Optional[_Union[PeerState, str]] = ..., address: _Optional[str] = ..., maddrs: _Optional[_Iterable[str]] = ..., protocol: _Optional[int] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., weight_version: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., expires: _Optional[float] = ..., committed: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., claimed: _Optional[float] = ..., capacity_tokens_per_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., pinned: bool = ..., moving_to: _Optional[int] = ..., moving_since: _Optional[float] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("origin", "tokens")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    origin: str
    tokens: int
    def __init__(self, origin: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("run_id", "protocol", "peer_id", "name", "role", "stage", "incarnation", "wall_clock")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WALL_CLOCK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    peer_id: str
    name: str
    role: Role
    stage: int
    incarnation: int
    wall_clock: float
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., peer_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., stage: _Optional[int] = ..., incarnation: _Optional[int] = ..., wall_clock: _Optional[float] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("peer_id", "name", "role", "stage", "incarnation", "wall_clock", "state", "software", "record")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WALL_CLOCK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    role: Role
    stage: int
    incarnation: int
    wall_clock: float
    state: PeerState
    software: str
    record: Record
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., stage: _Optional[int] = ..., incarnation: _Optional[int] = ..., wall_clock: _Optional[float] = ..., state: _Optional[_Union[PeerState, str]] = ..., software: _Optional[str] = ..., record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunReply(_message.Message):
    __slots__ = ("resolved_run",)
    RESOLVED_RUN_FIELD_NUMBER: _ClassVar[int]
    resolved_run: bytes
    def __init__(self, resolved_run: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("swarm",)
    SWARM_FIELD_NUMBER: _ClassVar[int]
    swarm: bool
    def __init__(self, swarm: bool = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("self", "peers", "global_tokens", "stop_tokens", "losses", "evaluations", "run_id", "run_name", "finished")
    SELF_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    self: PeerStatus
    peers: _containers.RepeatedCompositeFieldContainer[PeerStatus]
    global_tokens: int
    stop_tokens: int
    losses: _containers.RepeatedCompositeFieldContainer[LossPoint]
    evaluations: _containers.RepeatedCompositeFieldContainer[LossPoint]
    run_id: str
    run_name: str
    finished: bool
    def __init__(self_, self: _Optional[_Union[PeerStatus, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerStatus, _Mapping]]] = ..., global_tokens: _Optional[int] = ..., stop_tokens: _Optional[int] = ..., losses: _Optional[_Iterable[_Union[LossPoint, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[LossPoint, _Mapping]]] = ..., run_id: _Optional[str] = ..., run_name: _Optional[str] = ..., finished: bool = ...) -> None: ...

class PeerStatus(_message.Message):
    __slots__ = ("peer_id", "name", "role", "stage", "state", "address", "weight_version", "tokens_per_s", "age_s", "doing", "metrics", "last_error")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    role: Role
    stage: int
    state: PeerState
    address: str
    weight_version: int
    tokens_per_s: float
    age_s: float
    doing: str
    metrics: _containers.ScalarMap[str, float]
    last_error: str
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., stage: _Optional[int] = ..., state: _Optional[_Union[PeerState, str]] = ..., address: _Optional[str] = ..., weight_version: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., age_s: _Optional[float] = ..., doing: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., last_error: _Optional[str] = ...) -> None: ...

class LossPoint(_message.Message):
    __slots__ = ("tokens", "loss", "time", "label_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    loss: float
    time: float
    label_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., loss: _Optional[float] = ..., time: _Optional[float] = ..., label_tokens: _Optional[int] = ...) -> None: ...

class LinkMessage(_message.Message):
    __slots__ = ("open", "offer", "answer", "chunk", "gradient", "eval_result", "drop", "cancel", "credit", "progress", "prior", "kept")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    EVAL_RESULT_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    open: LinkOpen
    offer: Offer
    answer: Answer
    chunk: Chunk
    gradient: Gradient
    eval_result: EvalResult
    drop: Drop
    cancel: Cancel
    credit: Credit
    progress: Progress
    prior: PriorNotice
    kept: Kept
    def __init__(self, open: _Optional[_Union[LinkOpen, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., gradient: _Optional[_Union[Gradient, _Mapping]] = ..., eval_result: _Optional[_Union[EvalResult, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., prior: _Optional[_Union[PriorNotice, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class LinkOpen(_message.Message):
    __slots__ = ("run_id", "protocol", "peer_id", "name", "hop", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    peer_id: str
    name: str
    hop: int
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., peer_id: _Optional[str] = ..., name: _Optional[str] = ..., hop: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class MicrobatchId(_message.Message):
    __slots__ = ("origin", "sequence", "attempt")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    origin: str
    sequence: int
    attempt: int
    def __init__(self, origin: _Optional[str] = ..., sequence: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("codec", "prior", "shape", "dtype", "payload_bytes", "checksum")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    codec: str
    prior: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    payload_bytes: int
    checksum: int
    def __init__(self, codec: _Optional[str] = ..., prior: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("rows", "columns", "bits", "ids", "label_mask", "document_starts", "label_tokens", "seed", "checksum")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LABEL_MASK_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_STARTS_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    bits: int
    ids: bytes
    label_mask: bytes
    document_starts: bytes
    label_tokens: int
    seed: int
    checksum: int
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ..., bits: _Optional[int] = ..., ids: _Optional[bytes] = ..., label_mask: _Optional[bytes] = ..., document_starts: _Optional[bytes] = ..., label_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("id", "hop", "batch", "hidden", "committed", "evaluate")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    batch: Batch
    hidden: TensorHeader
    committed: _containers.RepeatedCompositeFieldContainer[Count]
    evaluate: int
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., hidden: _Optional[_Union[TensorHeader, _Mapping]] = ..., committed: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., evaluate: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("id", "hop", "verdict", "reason")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[Answer.Verdict]
        VERDICT_ACCEPTED: _ClassVar[Answer.Verdict]
        VERDICT_BUSY: _ClassVar[Answer.Verdict]
        VERDICT_DROP: _ClassVar[Answer.Verdict]
        VERDICT_NO_PRIOR: _ClassVar[Answer.Verdict]
    VERDICT_UNSPECIFIED: Answer.Verdict
    VERDICT_ACCEPTED: Answer.Verdict
    VERDICT_BUSY: Answer.Verdict
    VERDICT_DROP: Answer.Verdict
    VERDICT_NO_PRIOR: Answer.Verdict
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    verdict: Answer.Verdict
    reason: str
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ..., verdict: _Optional[_Union[Answer.Verdict, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("id", "hop", "offset", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    offset: int
    data: bytes
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Gradient(_message.Message):
    __slots__ = ("id", "hop", "gradient", "loss", "committed", "incarnation", "addition")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDITION_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    gradient: TensorHeader
    loss: float
    committed: _containers.RepeatedCompositeFieldContainer[Count]
    incarnation: int
    addition: int
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ..., gradient: _Optional[_Union[TensorHeader, _Mapping]] = ..., loss: _Optional[float] = ..., committed: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., incarnation: _Optional[int] = ..., addition: _Optional[int] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("incarnation", "upto")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    upto: int
    def __init__(self, incarnation: _Optional[int] = ..., upto: _Optional[int] = ...) -> None: ...

class EvalResult(_message.Message):
    __slots__ = ("id", "hop", "loss_sum", "label_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    loss_sum: float
    label_tokens: int
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ..., loss_sum: _Optional[float] = ..., label_tokens: _Optional[int] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("id", "hop", "reason", "text", "partial")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Drop.Reason]
        REASON_STALE: _ClassVar[Drop.Reason]
        REASON_NONFINITE: _ClassVar[Drop.Reason]
        REASON_CORRUPT: _ClassVar[Drop.Reason]
        REASON_LEAVING: _ClassVar[Drop.Reason]
        REASON_NO_ROUTE: _ClassVar[Drop.Reason]
        REASON_FAILED: _ClassVar[Drop.Reason]
        REASON_NO_SNAPSHOT: _ClassVar[Drop.Reason]
    REASON_UNSPECIFIED: Drop.Reason
    REASON_STALE: Drop.Reason
    REASON_NONFINITE: Drop.Reason
    REASON_CORRUPT: Drop.Reason
    REASON_LEAVING: Drop.Reason
    REASON_NO_ROUTE: Drop.Reason
    REASON_FAILED: Drop.Reason
    REASON_NO_SNAPSHOT: Drop.Reason
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    reason: Drop.Reason
    text: str
    partial: bool
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ..., reason: _Optional[_Union[Drop.Reason, str]] = ..., text: _Optional[str] = ..., partial: bool = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id", "hop")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    id: MicrobatchId
    hop: int
    def __init__(self, id: _Optional[_Union[MicrobatchId, _Mapping]] = ..., hop: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: _containers.RepeatedCompositeFieldContainer[Count]
    def __init__(self, committed: _Optional[_Iterable[_Union[Count, _Mapping]]] = ...) -> None: ...

class PriorNotice(_message.Message):
    __slots__ = ("boundary", "prior")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    prior: bytes
    def __init__(self, boundary: _Optional[int] = ..., prior: _Optional[bytes] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("hop", "places")
    HOP_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    hop: int
    places: int
    def __init__(self, hop: _Optional[int] = ..., places: _Optional[int] = ...) -> None: ...

class GossipMessage(_message.Message):
    __slots__ = ("open", "chunk", "done", "refusal", "sample")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    open: GossipOpen
    chunk: GossipChunk
    done: GossipDone
    refusal: GossipRefusal
    sample: GossipSample
    def __init__(self, open: _Optional[_Union[GossipOpen, _Mapping]] = ..., chunk: _Optional[_Union[GossipChunk, _Mapping]] = ..., done: _Optional[_Union[GossipDone, _Mapping]] = ..., refusal: _Optional[_Union[GossipRefusal, _Mapping]] = ..., sample: _Optional[_Union[GossipSample, _Mapping]] = ...) -> None: ...

class GossipOpen(_message.Message):
    __slots__ = ("run_id", "protocol", "peer_id", "stage", "weight_version", "committed", "count", "segment_blocks", "exchange", "subset", "bits", "offset", "listening", "work", "usual")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    SUBSET_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    USUAL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    peer_id: str
    stage: int
    weight_version: int
    committed: _containers.RepeatedCompositeFieldContainer[Count]
    count: int
    segment_blocks: int
    exchange: int
    subset: int
    bits: int
    offset: int
    listening: bool
    work: int
    usual: float
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., peer_id: _Optional[str] = ..., stage: _Optional[int] = ..., weight_version: _Optional[int] = ..., committed: _Optional[_Iterable[_Union[Count, _Mapping]]] = ..., count: _Optional[int] = ..., segment_blocks: _Optional[int] = ..., exchange: _Optional[int] = ..., subset: _Optional[int] = ..., bits: _Optional[int] = ..., offset: _Optional[int] = ..., listening: bool = ..., work: _Optional[int] = ..., usual: _Optional[float] = ...) -> None: ...

class GossipSample(_message.Message):
    __slots__ = ("values", "steps")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    steps: bytes
    def __init__(self, values: _Optional[bytes] = ..., steps: _Optional[bytes] = ...) -> None: ...

class GossipChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class GossipDone(_message.Message):
    __slots__ = ("segment", "checksum")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    segment: int
    checksum: int
    def __init__(self, segment: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class GossipRefusal(_message.Message):
    __slots__ = ("reason", "busy")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    busy: bool
    def __init__(self, reason: _Optional[str] = ..., busy: bool = ...) -> None: ...

class PriorOffer(_message.Message):
    __slots__ = ("run_id", "protocol", "notices", "peer_id", "whole")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    notices: _containers.RepeatedCompositeFieldContainer[SignedNotice]
    peer_id: str
    whole: bool
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., notices: _Optional[_Iterable[_Union[SignedNotice, _Mapping]]] = ..., peer_id: _Optional[str] = ..., whole: bool = ...) -> None: ...

class PriorAnswer(_message.Message):
    __slots__ = ("seen",)
    SEEN_FIELD_NUMBER: _ClassVar[int]
    seen: _containers.RepeatedCompositeFieldContainer[Seen]
    def __init__(self, seen: _Optional[_Iterable[_Union[Seen, _Mapping]]] = ...) -> None: ...

class Seen(_message.Message):
    __slots__ = ("author", "kind", "number", "version")
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    author: str
    kind: PriorKind
    number: int
    version: int
    def __init__(self, author: _Optional[str] = ..., kind: _Optional[_Union[PriorKind, str]] = ..., number: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class SignedNotice(_message.Message):
    __slots__ = ("notice", "public_key", "signature")
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    notice: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, notice: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("run_id", "author", "kind", "number", "name", "size_bytes", "version", "weight_version", "measured", "time", "tokens")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    author: str
    kind: PriorKind
    number: int
    name: bytes
    size_bytes: int
    version: int
    weight_version: int
    measured: int
    time: float
    tokens: int
    def __init__(self, run_id: _Optional[str] = ..., author: _Optional[str] = ..., kind: _Optional[_Union[PriorKind, str]] = ..., number: _Optional[int] = ..., name: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., version: _Optional[int] = ..., weight_version: _Optional[int] = ..., measured: _Optional[int] = ..., time: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("bundles",)
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    bundles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, bundles: _Optional[_Iterable[str]] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("run_id", "bundle")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    bundle: str
    def __init__(self, run_id: _Optional[str] = ..., bundle: _Optional[str] = ...) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("bundle", "files", "facts")
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    bundle: str
    files: _containers.RepeatedCompositeFieldContainer[FileEntry]
    facts: str
    def __init__(self, bundle: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ..., facts: _Optional[str] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("name", "size", "chunk_bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    chunk_bytes: int
    sha256: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., sha256: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "bundle", "file", "offset", "manifest_sha256")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    bundle: str
    file: str
    offset: int
    manifest_sha256: bytes
    def __init__(self, run_id: _Optional[str] = ..., bundle: _Optional[str] = ..., file: _Optional[str] = ..., offset: _Optional[int] = ..., manifest_sha256: _Optional[bytes] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
