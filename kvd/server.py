"""The control socket: typed requests in, one typed reply each out.

Who is asking comes from the kernel, through ZeroMQ's ``Peer-Address``, never from the message. A frame whose header
claims more than a control message may have ends its connection before it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from kvd import __version__
from kvd.leases import require_client_name
from kvd.listener import ControlListener
from kvd.logs import Log
from kvd.loop import Loop
from kvd.metrics.counters import DONE
from kvd.node import Node
from kvd.peers import Peer, peer_of_address
from kvd.saved.jobs import Job
from kvd.sessions.viewing import view
from kvd.stats import node_stats
from kvd.version import SPOKEN_VERSIONS, require_version
from protocol import codec, messages
from protocol.errors import BadMessage, KvdError, OsFailure, Replayed, UnsupportedVersion
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, BlockRequest, ErrorReply, Reply, Request, VerbOfLease

QUEUED_REQUESTS = 16
"""Messages of up to `codec.CONTROL_LIMIT` that are queued for each peer, in either direction."""

REMEMBERED_CONNECTIONS = 4096
"""Connections whose sequence number is known; the one that has been silent longest must then say hello again."""

UNREADABLE = "unreadable"
"""The verb, among counted requests, of what is not a message."""

BATCH = 64
"""Requests that are answered before the loop looks at anything else."""


@dataclass
class _Connection:
    peer: Peer
    last_seq: int


class ControlServer:
    """A ROUTER socket at ``path``, a path that is free. Answers from ``node``, called by ``loop``.

    ``files_needed`` is how many descriptors the daemon may come to need beside those of control connections.
    """

    def __init__(
        self,
        path: Path,
        handle_socket: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        loop: Loop,
        node: Node,
        files_needed: int,
        log: Log,
    ) -> None:
        self._node = node
        self._log = log
        self._handle_socket = handle_socket
        self._connections: OrderedDict[bytes, _Connection] = OrderedDict()
        self.socket = context.socket(zmq.ROUTER)
        # An identity that is in use cannot be taken over: replies go to who asked.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, codec.CONTROL_LIMIT)
        self.socket.setsockopt(zmq.RCVHWM, QUEUED_REQUESTS)
        self.socket.setsockopt(zmq.SNDHWM, QUEUED_REQUESTS)
        self.socket.setsockopt(zmq.LINGER, 1000)
        try:
            self.listener = ControlListener(self.socket, path, files_needed, loop, log)
        except OsFailure:
            self.socket.close()
            raise
        loop.watch(self.socket, self.serve)

    def close(self) -> None:
        self.listener.close()
        self.socket.close()

    def serve(self) -> None:
        """Answer what is waiting, up to a batch."""
        for _ in range(BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            peer = _sender(frames[-1])
            if peer is None:
                continue
            answer = self._answer(identity, peer, [frame.bytes for frame in frames[1:]])
            if answer is not None:
                self._send(identity, answer)
            self._node.sessions.frames.settle()  # what a fork has put off

    def _send(self, identity: bytes, answer: bytes) -> None:
        """Send; beyond `QUEUED_REQUESTS` answers that a peer does not fetch, more are lost.

        What peers have fetched ZeroMQ learns from commands that a busy socket reads once in a while only; asked for its
        events it reads them now. Else the answers to a quick client would count as not fetched.
        """
        self.socket.getsockopt(zmq.EVENTS)
        self.socket.send_multipart([identity, answer], zmq.NOBLOCK)

    def _answer(self, identity: bytes, peer: Peer, frames: list[bytes]) -> bytes | None:
        """The encoded answer to one message, whatever it is; None if a job will give it."""
        seq, verb = 0, UNREADABLE
        try:
            if len(frames) != 1:
                raise BadMessage(f"a message of {len(frames)} frames; allowed: 1")
            request = codec.decode_request(frames[0])
            seq, verb = request.seq, str(request.__struct_config__.tag)
            self._check_order(identity, peer, request)
            outcome = self._dispatch(request, peer)
            if not isinstance(outcome, Generator):
                return codec.encode(self._outcome(peer, seq, verb, outcome))
            self._node.jobs.start(outcome, partial(self._finish, identity, peer, seq, verb))
            return None
        except Exception as error:  # noqa: BLE001 - whatever one message does, the daemon goes on
            return codec.encode(self._outcome(peer, seq, verb, error))

    def _finish(self, identity: bytes, peer: Peer, seq: int, verb: str, outcome: Reply | Exception) -> None:
        """Send what a job has come to, if who asked is still there."""
        reply = self._outcome(peer, seq, verb, outcome)
        known = self._connections.get(identity)
        if known is None or known.peer != peer:
            return
        self._send(identity, codec.encode(reply))

    def _outcome(self, peer: Peer, seq: int, verb: str, outcome: Reply | Exception) -> Reply:
        """The reply that says what a request has come to, which is counted."""
        if not isinstance(outcome, Exception):
            self._node.counters.requests[verb, DONE] += 1
            return outcome
        reply = self._refusal(peer, seq, outcome)
        self._node.counters.requests[verb, reply.code] += 1
        return reply

    def _refusal(self, peer: Peer, seq: int, error: Exception) -> ErrorReply:
        if isinstance(error, KvdError):
            self._log.info("request refused", peer=str(peer), code=error.code, reason=error.message)
            return ErrorReply(seq, error.code, error.message, error.facts)
        self._log.error("request failed", peer=str(peer), exc_info=error)
        reason = f"the daemon failed: {type(error).__name__}; its log says more"
        return ErrorReply(seq, KvdError.code, reason, {})

    def _check_order(self, identity: bytes, peer: Peer, request: Request) -> None:
        """A connection says hello in a version spoken here first, and its sequence numbers rise from 1.

        Raises `UnsupportedVersion` or `Replayed`.
        """
        known = self._connections.get(identity)
        if known is None or known.peer != peer:
            if not isinstance(request, messages.Hello):
                raise UnsupportedVersion(f"none: {type(request).__name__} came before Hello", SPOKEN_VERSIONS)
            known = _Connection(peer, 0)
        if request.seq <= known.last_seq:
            raise Replayed(request.seq, known.last_seq)
        if isinstance(request, messages.Hello):
            require_version(request.major, request.minor)
        known.last_seq = request.seq
        self._connections[identity] = known
        self._connections.move_to_end(identity)
        if len(self._connections) > REMEMBERED_CONNECTIONS:
            self._connections.popitem(last=False)

    def _dispatch(self, request: Request, peer: Peer) -> Reply | Job:
        """The answer, or what will give it."""
        node = self._node
        if isinstance(request, BlockRequest):
            return self._of_blocks(request, peer)
        match request:
            case messages.Hello():
                return self._welcome(request)
            case messages.Stat():
                return messages.Stats(request.seq, node_stats(node))
            case messages.Drain():
                node.operators.require(peer)
                if request.save:
                    node.saving.require_directory()
                node.drain(request.save)
                return messages.Done(request.seq)
            case messages.RevokeLease():
                node.operators.require(peer)
                node.revoke(node.leases.numbered(request.number))
                return messages.Done(request.seq)
            case messages.EndSession():
                node.operators.require(peer)
                return node.lazy.ending(partial(self._end_session, request))
            case messages.Resize():
                node.operators.require(peer)
                node.require_accepting()
                return node.live.resize(request.seq, request.key, request.nbytes)
            case messages.ReloadReport():
                node.operators.require(peer)
                return node.live.report(request.seq)
            case messages.SaveSession():
                return node.lazy.waiting(partial(node.saving.save, peer, request))
            case messages.RestoreSession():
                node.require_accepting()
                return node.saving.restore(peer, request)
            case messages.ListSaved():
                return node.saving.saved(peer, request)
            case messages.RemoveSaved():
                return node.saving.remove(peer, request)
            case messages.FetchPages():
                return node.lazy.fetch(partial(node.leases.find, request.lease, peer), request)
        act = partial(self._with_room, request, peer)
        if isinstance(request, messages.OpenSession):
            return node.lazy.waiting(act)
        if node.lazy.is_idle:
            return act()
        return node.lazy.ending(act) if isinstance(request, messages.CloseSession) else node.lazy.waiting(act)

    def _end_session(self, request: messages.EndSession) -> Reply:
        self._node.end_stored(request.uid, request.name)
        return messages.Done(request.seq)

    def _of_blocks(self, request: BlockRequest, peer: Peer) -> Reply | Job:
        """The answer to a request about blocks."""
        node = self._node
        lease = node.leases.find(request.lease, peer)
        match request:
            case messages.OpenBlocks():
                node.require_accepting()
                return node.blocks.open(lease, request)
            case messages.MapBlocks():
                return node.blocks.map(lease, request)
            case messages.FindBlocks():
                return node.blocks.find(lease, request)
            case messages.PinBlocks():
                return node.blocks.pin(lease, request, partial(node.leases.find, request.lease, peer))
            case messages.ReserveBlocks():
                node.require_accepting()
                return node.blocks.reserve(lease, request)
            case messages.PublishBlocks():
                return node.blocks.publish(lease, request)
            case messages.ReleaseBlocks():
                return node.blocks.release(lease, request)

    def _with_room(self, request: VerbOfLease, peer: Peer) -> Reply | Job:
        """The answer to a request that names a lease, with sessions spilled if it finds no room."""
        spilling, act = self._node.spilling, partial(self._of_lease, request, peer)
        if not spilling.is_on:
            return act()
        if isinstance(request, messages.OpenSession):
            return spilling.opening(peer.uid, request.name, act, lazy=request.lazy)
        return spilling.with_room(act)

    def _of_lease(self, request: VerbOfLease, peer: Peer) -> Reply:
        """The answer to a request that names a lease. Asked again if room has been made: the lease may have ended."""
        node = self._node
        lease = node.leases.find(request.lease, peer)
        match request:
            case messages.CreateSession():
                node.require_accepting()
                return node.sessions.create(lease, request)
            case messages.OpenSession():
                node.require_accepting()
                return node.sessions.open(lease, request)
            case messages.ViewSession():
                return view(node.sessions, lease, request)
            case messages.ReattachSession():
                return node.inheritance.reattach(lease, request)
            case messages.ExtendSession():
                node.require_accepting()
                return node.sessions.extend(lease, request)
            case messages.TruncateSession():
                return node.sessions.truncate(lease, request)
            case messages.DetachSession():
                return node.sessions.detach(lease, request)
            case messages.CloseSession():
                return node.sessions.close(lease, request)
            case messages.ForkSession():
                node.require_accepting()
                return node.forks.fork(lease, request)
            case messages.FindPrefix():
                return node.forks.find_prefix(lease, request)
            case messages.AllocateDevice():
                node.require_accepting()
                if request.session:
                    node.sessions.require_holder(lease, request.session)
                return node.device_memory.allocate(lease, request)
            case messages.FreeDevice():
                return node.device_memory.free(lease, request)

    def _welcome(self, request: messages.Hello) -> messages.Welcome:
        require_client_name(request.client)
        return messages.Welcome(
            seq=request.seq,
            major=PROTOCOL_MAJOR,
            minor=min(PROTOCOL_MINOR, request.minor),
            daemon_version=__version__,
            epoch=self._node.leases.epoch,
            handle_socket=str(self._handle_socket),
            extent_bytes=self._node.host.extent_bytes,
            devices=self._node.devices(),
        )


def _sender(frame: zmq.Frame) -> Peer | None:
    """Who sent the message; None where ZeroMQ does not say, as of what is no ZMTP: that is no request of anybody's."""
    try:
        return peer_of_address(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return None
