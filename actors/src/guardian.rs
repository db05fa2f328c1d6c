//! Watches the core actors. A panic in a handler ends an actix actor for good and tells nobody, so somebody has to ask.

use actix::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// "Are you there?" Every core actor answers it.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Ping;

/// Called once, with a sentence, when a core actor is gone or silent. The program logs it and exits non-zero, so that its
/// supervisor (systemd, Kubernetes, compose) starts it anew in a clean state.
pub type OnFatal = Box<dyn Fn(String) + Send + Sync>;

const ASK_EVERY: Duration = Duration::from_secs(2);
/// Longer than any handler of ours takes by orders of magnitude; shorter than a person's patience.
const SILENT_AFTER: Duration = Duration::from_secs(20);

/// The watcher.
pub struct Guardian {
    watched: Vec<(&'static str, Recipient<Ping>)>,
    on_fatal: Arc<OnFatal>,
    /// An orderly shutdown has begun: an actor that is gone is meant to be.
    standing_down: Arc<AtomicBool>,
}

impl Guardian {
    /// Watches these actors, by name.
    #[must_use]
    pub fn new(watched: Vec<(&'static str, Recipient<Ping>)>, on_fatal: Arc<OnFatal>) -> Self {
        Guardian { watched, on_fatal, standing_down: Arc::default() }
    }
}

impl Actor for Guardian {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(ASK_EVERY, |guardian, _| {
            for (name, recipient) in &guardian.watched {
                let (name, on_fatal, standing_down) =
                    (*name, guardian.on_fatal.clone(), guardian.standing_down.clone());
                let asked = recipient.send(Ping);
                actix::spawn(async move {
                    let fault = match tokio::time::timeout(SILENT_AFTER, asked).await {
                        Ok(Ok(())) => return,
                        Ok(Err(MailboxError::Closed)) => format!("the {name} actor is gone (it panicked)"),
                        Ok(Err(MailboxError::Timeout)) | Err(_) => {
                            format!("the {name} actor has not answered for {} s", SILENT_AFTER.as_secs())
                        }
                    };
                    if !standing_down.load(Ordering::Acquire) {
                        on_fatal(fault);
                    }
                });
            }
        });
    }
}

/// Ends the watch, before an orderly shutdown stops the watched.
#[derive(Message)]
#[rtype(result = "()")]
pub struct StandDown;

impl Handler<StandDown> for Guardian {
    type Result = ();

    fn handle(&mut self, _: StandDown, ctx: &mut Self::Context) {
        self.standing_down.store(true, Ordering::Release);
        self.watched.clear();
        ctx.stop();
    }
}
