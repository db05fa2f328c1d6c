//! Owns a TCP relay on the loopback address: the wire between a program and a service, which a test can cut, stall or
//! slow down without touching either end.
//!
//! Each connection has four threads (a reader and a writer for each direction), so that a delay holds up every byte by
//! the same time and not the throughput. The number of connections is bounded, and so is what is in flight in each.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::ports::Port;

const CHUNK_BYTES: usize = 16 * 1024;
const CHUNKS_IN_FLIGHT_MAX: usize = 256;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A TCP relay from a port of its own to a target port, both on the loopback address.
#[derive(Debug)]
pub struct Relay {
    port: Port,
    wire: Arc<Wire>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Wire {
    target: u16,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    open: bool,
    /// Stalled directions: to the target, and back.
    stalled: [bool; 2],
    delay: Duration,
    connections: Vec<Connection>,
    next_id: u64,
    accepted: u64,
}

#[derive(Debug)]
struct Connection {
    id: u64,
    client: TcpStream,
    server: TcpStream,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    ToTarget = 0,
    Back = 1,
}

impl Relay {
    /// More connections than this are closed as soon as they come.
    pub const CONNECTIONS_MAX: usize = 128;

    /// Starts to relay to `target`, a port of the loopback address.
    ///
    /// # Errors
    /// When no port is free.
    pub fn start(target: u16) -> Result<Self> {
        let state = State {
            open: false,
            stalled: [false; 2],
            delay: Duration::ZERO,
            connections: Vec::new(),
            next_id: 0,
            accepted: 0,
        };
        let wire = Arc::new(Wire { target, state: Mutex::new(state), changed: Condvar::new() });
        let mut relay = Self { port: Port::reserve()?, wire, acceptor: None };
        relay.heal()?;
        Ok(relay)
    }

    /// The port to connect to instead of the target's.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `url` with the relay's port in the place of the target's.
    pub fn url(&self, url: &str) -> String {
        url.replace(&format!(":{}", self.wire.target), &format!(":{}", self.port()))
    }

    /// Closes every connection and refuses new ones until [`Self::heal`]. When it returns, a connection is refused.
    pub fn cut(&mut self) {
        self.wire.change(|state| state.open = false);
        if let Some(acceptor) = self.acceptor.take() {
            // Wakes the thread from its accept; it then sees that the wire is cut and closes the listener.
            let _ = TcpStream::connect(self.address());
            let _ = acceptor.join();
        }
        self.drop_connections();
    }

    /// Closes every connection; new ones are relayed: a short interruption.
    pub fn drop_connections(&self) {
        self.wire.change(|state| {
            for connection in state.connections.drain(..) {
                connection.close();
            }
        });
    }

    /// Relays again, after any of the faults. What was held back by a stall now arrives.
    ///
    /// # Errors
    /// When the port can't be taken again.
    pub fn heal(&mut self) -> Result<()> {
        self.wire.change(|state| {
            state.open = true;
            state.stalled = [false; 2];
            state.delay = Duration::ZERO;
        });
        if self.acceptor.is_none() {
            let listener = TcpListener::bind(self.address()).context("the relay's port")?;
            let wire = Arc::clone(&self.wire);
            self.acceptor = Some(std::thread::spawn(move || wire.accept(&listener)));
        }
        Ok(())
    }

    /// Keeps every connection open (and takes new ones) but forwards nothing either way: a network that swallows.
    pub fn stall(&self) {
        self.wire.change(|state| state.stalled = [true; 2]);
    }

    /// Forwards to the target but holds back its answers: what was asked happens, and nobody hears of it.
    pub fn stall_answers(&self) {
        self.wire.change(|state| state.stalled[Direction::Back as usize] = true);
    }

    /// Holds up every byte by `by`, each way. Zero ends it.
    pub fn delay(&self, by: Duration) {
        self.wire.change(|state| state.delay = by);
    }

    /// How many connections are relayed now.
    pub fn connections(&self) -> usize {
        self.wire.lock().connections.len()
    }

    /// How many connections have been accepted since the start.
    pub fn accepted(&self) -> u64 {
        self.wire.lock().accepted
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port()))
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
    }
}

impl Connection {
    fn close(&self) {
        // They may be closed already, by either end.
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn accept(self: Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if !self.lock().open {
                return;
            }
            // Out of file descriptors, or a client that is gone again: the next one may do better.
            let Ok(client) = client else { continue };
            // A target that refuses shows as a connection that closes at once.
            let _ = self.join(client);
        }
    }

    fn join(self: &Arc<Self>, client: TcpStream) -> std::io::Result<()> {
        let target = SocketAddr::from((Ipv4Addr::LOCALHOST, self.target));
        if self.lock().connections.len() >= Relay::CONNECTIONS_MAX {
            return Ok(());
        }
        let server = TcpStream::connect_timeout(&target, CONNECT_TIMEOUT)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let ends = [(client.try_clone()?, server.try_clone()?), (server.try_clone()?, client.try_clone()?)];
        let id = {
            let mut state = self.lock();
            if !state.open {
                return Ok(());
            }
            state.accepted += 1;
            state.next_id += 1;
            let id = state.next_id;
            state.connections.push(Connection { id, client, server });
            id
        };
        for ((from, to), direction) in ends.into_iter().zip([Direction::ToTarget, Direction::Back]) {
            let (chunks_in, chunks_out) = sync_channel(CHUNKS_IN_FLIGHT_MAX);
            let wire = Arc::clone(self);
            std::thread::spawn(move || wire.read(from, &chunks_in));
            let wire = Arc::clone(self);
            std::thread::spawn(move || wire.write(id, to, &chunks_out, direction));
        }
        Ok(())
    }

    fn read(&self, mut from: TcpStream, chunks: &SyncSender<(Instant, Vec<u8>)>) {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    let due = Instant::now() + self.lock().delay;
                    if chunks.send((due, buffer[..count].to_vec())).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn write(&self, id: u64, mut to: TcpStream, chunks: &Receiver<(Instant, Vec<u8>)>, direction: Direction) {
        for (due, chunk) in chunks {
            if !self.wait_to_forward(id, due, direction) || to.write_all(&chunk).is_err() {
                self.forget(id);
                return;
            }
        }
        // The other end has closed, or half-closed: pass that on, in its turn and under the same stall.
        if !self.wait_to_forward(id, Instant::now(), direction) || to.shutdown(Shutdown::Write).is_err() {
            self.forget(id);
        } else if matches!(direction, Direction::Back) {
            // A server that closes is done with the connection; a client may only have finished asking.
            self.forget(id);
        }
    }

    /// Waits until `due` and until the direction is not stalled. False if the connection was closed meanwhile.
    fn wait_to_forward(&self, id: u64, due: Instant, direction: Direction) -> bool {
        let mut state = self.lock();
        loop {
            if !state.connections.iter().any(|connection| connection.id == id) {
                return false;
            }
            let left = due.saturating_duration_since(Instant::now());
            let stalled = state.stalled[direction as usize];
            if !stalled && left.is_zero() {
                return true;
            }
            state = if stalled {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    fn forget(&self, id: u64) {
        self.change(|state| {
            if let Some(index) = state.connections.iter().position(|connection| connection.id == id) {
                state.connections.swap_remove(index).close();
            }
        });
    }
}
