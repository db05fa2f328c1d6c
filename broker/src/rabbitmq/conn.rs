//! One connection, with a way to end it that needs nobody's answer.
//!
//! RabbitMQ (seen with 3.10) can leave a connection in the state "flow" for ever: when somebody deletes a quorum queue while many
//! messages are on their way into it, the credit that the channel has given is not given back, and the server reads nothing more
//! from that socket, not even a request to close. Heartbeats go on meanwhile. Only a new connection helps.

use super::error::sort;
use crate::port::{BrokerError, Result};
use lapin::tcp::{AMQPUriTcpExt, AsyncTcpStream};
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties};
use std::net::{Shutdown, TcpStream};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The server answers `channel.open` by itself, without any queue or disk.
const OPEN_TIMEOUT: Duration = Duration::from_secs(3);

/// A second handle to a connection's socket.
#[derive(Clone, Default)]
pub(super) struct Socket(Arc<Mutex<Option<TcpStream>>>);

impl Socket {
    /// Ends the connection for both sides. lapin has no such call, and keeps a thread until its socket dies.
    pub(super) fn shut(&self) {
        if let Some(socket) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Connects, and keeps a handle to the socket.
pub(super) async fn open(uri: AMQPUri, properties: ConnectionProperties, socket: Socket) -> lapin::Result<Connection> {
    let runtime = lapin::runtime::default_runtime()?;
    let like = runtime.clone();
    let connect = async move |uri: AMQPUri, runtime| {
        same_type(&like, &runtime);
        let stream = AMQPUriTcpExt::connect_async(&uri, &runtime).await?;
        // With TLS there is no way to the socket; a stuck connection would then stay beside its successor until the server ends it.
        if let AsyncTcpStream::Plain(plain) = &stream {
            let handle = plain.get_ref().as_fd().try_clone_to_owned()?;
            *socket.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(TcpStream::from(handle));
        }
        Ok(stream)
    };
    Connection::connector(uri, runtime, connect, properties).await
}

/// Tells the compiler the type of lapin's runtime, whose crate is not ours to name.
fn same_type<T>(_: &T, _: &T) {}

/// A connection.
pub(super) struct Conn {
    connection: Connection,
    socket: Socket,
    given_up: Mutex<Option<String>>,
}

impl Conn {
    pub(super) fn new(connection: Connection, socket: Socket) -> Self {
        Self { connection, socket, given_up: Mutex::default() }
    }

    /// Opens a channel. A server that does not answer even that has forgotten this connection, which is ended then.
    pub(super) async fn channel(&self) -> Result<Channel> {
        let blocked = || BrokerError::Unavailable("the server takes no messages for now".into());
        if self.status().blocked() {
            // lapin sends nothing then; that is no fault of the connection.
            return Err(blocked());
        }
        match tokio::time::timeout(OPEN_TIMEOUT, self.create_channel()).await {
            Ok(opened) => opened.map_err(|e| sort(&e)),
            Err(_) if self.status().blocked() => Err(blocked()),
            Err(_) => {
                let why = format!("no answer to a request within {} s", OPEN_TIMEOUT.as_secs());
                *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.clone());
                self.socket.shut();
                Err(BrokerError::Unavailable(why))
            }
        }
    }

    /// Leaves nothing behind, and says why it was given up, if so.
    pub(super) fn end(&self) -> Option<String> {
        self.socket.shut();
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Deref for Conn {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}
