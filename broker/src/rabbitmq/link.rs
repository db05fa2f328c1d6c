//! One connection, kept up for ever: connects in the background, notices its loss, connects again.

use super::conn::{self, Conn, Socket};
use super::error;
use super::url::Address;
use crate::backoff::Backoff;
use crate::health::{CLOSED, Health};
use crate::metric_definitions as m;
use crate::port::{BrokerError, BrokerState, Result};
use futures_util::StreamExt;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::{ConnectionProperties, ErrorKind, Event};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// A consumer comes after its connection, and both within the 5 s after the server's return that are promised. One try a second of
/// each process costs a server nothing, and less than the work that waits.
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// A connection that lived that long was a success; one that dies sooner makes the pauses grow.
const STABLE_AFTER: Duration = Duration::from_secs(1);
/// How long a handshake may take.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// How often the connection's own word is asked, besides its events.
const WATCHDOG: Duration = Duration::from_millis(500);
const GOODBYE: Duration = Duration::from_secs(2);

/// Tells tasks that the broker is being closed.
#[derive(Clone)]
pub(super) struct Closing(watch::Receiver<bool>);

impl Closing {
    pub(super) fn new(sender: &watch::Sender<bool>) -> Self {
        Self(sender.subscribe())
    }

    /// Ends when the broker is closed, or was dropped.
    pub(super) async fn wait(&mut self) {
        // An error means that the sender is gone, which is the same.
        let _ = self.0.wait_for(|closing| *closing).await;
    }
}

/// What a link is made of.
pub(super) struct LinkOptions {
    pub part: usize,
    pub kind: &'static str,
    pub name: String,
    pub address: Address,
    pub health: Arc<Health>,
    pub closing: Closing,
}

#[derive(Clone)]
enum LinkState {
    Down(String),
    Up { connection: Arc<Conn>, blocked: Option<String> },
    Closed,
}

/// A handle to a connection that is kept up.
#[derive(Clone)]
pub(super) struct Link {
    state: watch::Receiver<LinkState>,
}

impl Link {
    /// Starts the loop that keeps it up.
    pub(super) fn open(runtime: &Handle, options: LinkOptions) -> Self {
        let (sender, state) = watch::channel(LinkState::Down("not connected yet".into()));
        runtime.spawn(keep_up(options, sender));
        Self { state }
    }

    /// The connection, if it is up.
    pub(super) fn now(&self) -> Result<Arc<Conn>> {
        match &*self.state.borrow() {
            LinkState::Up { connection, .. } => Ok(connection.clone()),
            LinkState::Down(why) => Err(BrokerError::Unavailable(why.clone())),
            LinkState::Closed => Err(BrokerError::Unavailable("the connection is closed".into())),
        }
    }

    /// Waits for the connection; `None` when it will never be there again.
    pub(super) async fn up(&self) -> Option<Arc<Conn>> {
        let mut state = self.state.clone();
        let state = state.wait_for(|s| !matches!(s, LinkState::Down(_))).await.ok()?;
        match &*state {
            LinkState::Up { connection, .. } => Some(connection.clone()),
            _ => None,
        }
    }

    /// The reason why the server takes no messages, if so.
    pub(super) fn blocked_now(&self) -> Option<String> {
        match &*self.state.borrow() {
            LinkState::Up { blocked, .. } => blocked.clone(),
            _ => None,
        }
    }

    /// Waits until the server takes no messages.
    pub(super) async fn blocked(&self) -> String {
        let mut state = self.state.clone();
        let blocked = |s: &LinkState| matches!(s, LinkState::Up { blocked: Some(_), .. });
        if let Ok(state) = state.wait_for(blocked).await
            && let LinkState::Up { blocked: Some(reason), .. } = &*state
        {
            return reason.clone();
        }
        std::future::pending().await
    }

    /// Waits until the loop has ended.
    pub(super) async fn closed(&self) {
        let mut state = self.state.clone();
        let _ = state.wait_for(|s| matches!(s, LinkState::Closed)).await;
    }
}

async fn keep_up(mut options: LinkOptions, state: watch::Sender<LinkState>) {
    let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_MAX);
    let mut closing = options.closing.clone();
    let mut ever_tried = false;
    loop {
        let connected = tokio::select! {
            connected = connect(&options) => connected,
            () = closing.wait() => break,
        };
        let why = match connected {
            Ok(connection) => {
                let since = Instant::now();
                let Some(why) = stay(&mut options, connection, &state).await else { break };
                metrics::counter!(m::RECONNECTS, "connection" => options.kind).increment(1);
                if since.elapsed() >= STABLE_AFTER {
                    backoff.reset();
                }
                why
            }
            Err(why) => {
                if !ever_tried {
                    options.health.log_first_failure(&why);
                }
                why
            }
        };
        ever_tried = true;
        options.health.set(options.part, BrokerState::Away(why.clone()));
        state.send_replace(LinkState::Down(why));
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            () = closing.wait() => break,
        }
    }
    options.health.set(options.part, BrokerState::Away(CLOSED.into()));
    state.send_replace(LinkState::Closed);
}

async fn connect(options: &LinkOptions) -> std::result::Result<Conn, String> {
    let properties = ConnectionProperties::default()
        .with_connection_name(options.name.as_str().into())
        .with_client_property("product".into(), "shardcron".into())
        .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into());
    let address = &options.address;
    let socket = Socket::default();
    match tokio::time::timeout(HANDSHAKE_PATIENCE, conn::open(address.uri(), properties, socket.clone())).await {
        Ok(Ok(connection)) => Ok(Conn::new(connection, socket)),
        Ok(Err(error)) => Err(explain(&error, address)),
        Err(_) => {
            socket.shut();
            Err(format!("no answer from {} within {} s", address.masked(), HANDSHAKE_PATIENCE.as_secs()))
        }
    }
}

fn explain(error: &lapin::Error, address: &Address) -> String {
    let user = address.user().map_or_else(|| "the user of the address".to_owned(), |user| format!("'{user}'"));
    let vhost = address.vhost();
    let advice = match error.kind() {
        ErrorKind::ProtocolError(e) => match e.kind() {
            AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => {
                format!("; check the password of {user} and its rights on the vhost '{vhost}'")
            }
            AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => {
                format!("; check that the vhost '{vhost}' exists and {user} may use it")
            }
            _ => String::new(),
        },
        _ => String::new(),
    };
    format!("{} at {}{advice}", text(error), address.masked())
}

fn text(error: &lapin::Error) -> String {
    match error::sort(error) {
        BrokerError::Unavailable(text) | BrokerError::Refused(text) => text,
    }
}

/// Serves one connection until it is lost, and says why; `None` when the broker was closed.
async fn stay(options: &mut LinkOptions, connection: Conn, state: &watch::Sender<LinkState>) -> Option<String> {
    let mut events = connection.events_listener();
    let connection = Arc::new(connection);
    // Whoever hears "up" finds the connection up: trouble is told before it is there, and its end after.
    let report = |blocked: Option<String>| {
        let link = LinkState::Up { connection: connection.clone(), blocked: blocked.clone() };
        match blocked {
            Some(reason) => {
                options.health.set(options.part, BrokerState::Blocked(reason));
                state.send_replace(link);
            }
            None => {
                state.send_replace(link);
                options.health.set(options.part, BrokerState::Up);
            }
        }
    };
    report(None);
    let mut watchdog = tokio::time::interval(WATCHDOG);
    watchdog.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_error = String::from("the connection was lost");
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Event::ConnectionBlocked(reason)) => report(Some(reason)),
                Some(Event::ConnectionUnblocked) => report(None),
                // Errors of channels come here, too; only the connection's own end matters.
                Some(Event::Error(error)) => last_error = text(&error),
                Some(_) => {}
                None => return Some(connection.end().unwrap_or(last_error)),
            },
            _ = watchdog.tick() => {}
            () = options.closing.wait() => {
                let goodbye = connection.close(200, "shardcron closes".into());
                let _ = tokio::time::timeout(GOODBYE, goodbye).await;
                connection.end();
                return None;
            }
        }
        if !connection.status().connected() {
            return Some(connection.end().unwrap_or(last_error));
        }
    }
}
