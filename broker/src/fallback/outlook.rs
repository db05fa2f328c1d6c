//! What one process knows: whether its own broker is away, and whether the leader says that shards are without messages.

use super::NOTE_EVERY;
use crate::health::CLOSED;
use crate::port::BrokerState;
use shardcron_store::Ledger;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// Shared by a fallback broker and all its consumers.
pub(super) struct Outlook {
    seen: watch::Sender<Seen>,
    fault: watch::Sender<Option<String>>,
    reads_note: AtomicBool,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    /// Why this process can't reach the broker, once it has been so for long enough.
    away: Option<String>,
    /// Since when the leader hands out through the ledger, milliseconds UTC.
    noted: Option<i64>,
    closed: bool,
}

impl Seen {
    fn fault(&self) -> Option<String> {
        let noted =
            || self.noted.map(|_| "the leader can't reach the broker and hands out through the ledger".to_owned());
        self.away.clone().or_else(noted)
    }

    fn polls(&self) -> bool {
        self.away.is_some() || self.noted.is_some()
    }
}

impl Outlook {
    pub(super) fn new() -> Self {
        Self {
            seen: watch::Sender::new(Seen::default()),
            fault: watch::Sender::new(None),
            reads_note: AtomicBool::new(false),
        }
    }

    /// Whether this process does without the broker.
    pub(super) fn fallen(&self) -> bool {
        self.seen.borrow().away.is_some()
    }

    /// Waits until it does.
    pub(super) async fn falls(&self) {
        // The sender is in here, so it can't be gone.
        let _ = self.seen.subscribe().wait_for(|seen| seen.away.is_some()).await;
    }

    /// Whether consumers are to poll the ledger.
    pub(super) fn polls(&self) -> bool {
        self.seen.borrow().polls()
    }

    /// Something that `polls` depends on has changed; ends when the broker is closed.
    pub(super) fn changes(&self) -> Changes {
        Changes(self.seen.subscribe())
    }

    pub(super) fn fault(&self) -> watch::Receiver<Option<String>> {
        self.fault.subscribe()
    }

    pub(super) fn close(&self) {
        self.update(|seen| seen.closed = true);
    }

    fn update(&self, change: impl FnOnce(&mut Seen)) {
        self.seen.send_modify(|seen| {
            change(seen);
            // In here, so that two writers can't publish their views in the wrong order. A new reason for the same fault is none.
            let fault = seen.fault();
            self.fault.send_if_modified(|now| {
                let turned = now.is_some() != fault.is_some();
                if turned {
                    *now = fault;
                }
                turned
            });
        });
    }

    /// Begins to read the leader's note; for processes that consume. Once is enough.
    pub(super) fn read_note(self: &Arc<Self>, ledger: &Arc<dyn Ledger>, runtime: &tokio::runtime::Handle) {
        if !self.reads_note.swap(true, Ordering::Relaxed) {
            runtime.spawn(watch_note(self.clone(), ledger.clone()));
        }
    }
}

/// See [`Outlook::changes`].
pub(super) struct Changes(watch::Receiver<Seen>);

impl Changes {
    /// Waits for the next; false when there is none, as the broker is closed.
    pub(super) async fn next(&mut self) -> bool {
        self.0.changed().await.is_ok() && !self.0.borrow().closed
    }

    /// Waits until the broker is closed.
    pub(super) async fn closed(&mut self) {
        let _ = self.0.wait_for(|seen| seen.closed).await;
    }
}

/// Falls back when the broker has been away for long enough, and comes back with it at once.
pub(super) async fn watch_broker(outlook: Arc<Outlook>, mut state: watch::Receiver<BrokerState>, after: Duration) {
    let mut changes = outlook.changes();
    loop {
        let away = match &*state.borrow_and_update() {
            BrokerState::Away(why) if why == CLOSED => return,
            BrokerState::Away(why) => Some(why.clone()),
            BrokerState::Up | BrokerState::Blocked(_) => None,
        };
        let Some(why) = away else {
            if outlook.fallen() {
                outlook.update(|seen| seen.away = None);
                tracing::info!("the broker is back; shards go through it again");
            }
            tokio::select! {
                changed = state.changed() => if changed.is_err() { return },
                () = changes.closed() => return,
            }
            continue;
        };
        // Further tries to reconnect change the reason only, and must not begin the wait anew.
        let back = state.wait_for(|s| !matches!(s, BrokerState::Away(_)));
        let waited = async {
            if outlook.fallen() {
                return back.await.is_ok();
            }
            match tokio::time::timeout(after, back).await {
                Ok(back) => back.is_ok(),
                Err(_) => {
                    outlook.update(|seen| seen.away = Some(why));
                    true
                }
            }
        };
        tokio::select! {
            goes_on = waited => if !goes_on { return },
            () = changes.closed() => return,
        }
    }
}

/// Reads whether there are shards without messages. A ledger that is away changes nothing: nothing could be claimed either.
async fn watch_note(outlook: Arc<Outlook>, ledger: Arc<dyn Ledger>) {
    let mut ticks = tokio::time::interval(NOTE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut changes = outlook.changes();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = changes.closed() => return,
        }
        match ledger.polling().await {
            Ok(polling) => {
                let noted = polling.map(|p| p.since_ms);
                if outlook.seen.borrow().noted != noted {
                    outlook.update(|seen| seen.noted = noted);
                }
            }
            Err(error) => tracing::debug!(%error, "the leader's note could not be read"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away(why: &str) -> BrokerState {
        BrokerState::Away(why.into())
    }

    #[tokio::test(start_paused = true)]
    async fn it_falls_back_after_the_grace_and_comes_back_at_once() {
        let outlook = Arc::new(Outlook::new());
        let (state, seen) = watch::channel(away("not connected yet"));
        tokio::spawn(watch_broker(outlook.clone(), seen, Duration::from_secs(2)));
        let began = tokio::time::Instant::now();
        for _ in 0..6 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            state.send_replace(away("refused"));
        }
        assert!(!outlook.fallen(), "not yet");
        outlook.falls().await;
        assert_eq!(began.elapsed().as_secs(), 2, "new reasons do not begin the wait anew");
        assert!(outlook.polls() && outlook.fault().borrow().is_some());
        let mut fault = outlook.fault();
        state.send_replace(BrokerState::Blocked("low memory".into()));
        fault.wait_for(Option::is_none).await.unwrap();
        assert!(!outlook.polls(), "blocked is not away");
        state.send_replace(away("cut"));
        tokio::time::sleep(Duration::from_millis(1_900)).await;
        state.send_replace(BrokerState::Up);
        tokio::time::sleep(Duration::from_millis(1_900)).await;
        state.send_replace(away("cut"));
        tokio::time::sleep(Duration::from_millis(1_900)).await;
        assert!(!outlook.fallen(), "short interruptions are waited out");
    }
}
