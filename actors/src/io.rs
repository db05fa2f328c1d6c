//! Where tasks and actors run.

use actix::prelude::*;
use std::future::Future;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Where the actors' I/O runs, and so where they run themselves. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Io(Place);

#[derive(Clone, Debug)]
enum Place {
    Runtime(Handle),
    Here,
}

impl Io {
    /// I/O on a multi-thread runtime, and each core actor on an arbiter of its own. A connection opened on an arbiter would die with
    /// it, and starve with it.
    #[must_use]
    pub fn on(runtime: Handle) -> Self {
        Io(Place::Runtime(runtime))
    }

    /// Everything in the `LocalSet` of whoever spawns. A whole process is one future then: who does not poll it has paused the
    /// process, and who drops it has killed it. For simulations.
    #[must_use]
    pub fn here() -> Self {
        Io(Place::Here)
    }

    /// Runs a task.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        match &self.0 {
            Place::Runtime(runtime) => runtime.spawn(task),
            Place::Here => tokio::task::spawn_local(task),
        }
    }

    /// A place for actors.
    pub(crate) fn stage(&self) -> Stage {
        match &self.0 {
            Place::Runtime(_) => Stage(Some(Arbiter::new())),
            Place::Here => Stage(None),
        }
    }
}

/// An arbiter, where there are arbiters.
pub(crate) struct Stage(Option<Arbiter>);

impl Stage {
    pub(crate) fn start<A>(&self, actor: A) -> Addr<A>
    where
        A: Actor<Context = Context<A>> + Send,
    {
        match &self.0 {
            Some(arbiter) => Actor::start_in_arbiter(&arbiter.handle(), move |_| actor),
            None => actor.start(),
        }
    }

    /// Ends it with its actors. Those in a `LocalSet` end with that.
    pub(crate) fn stop(&self) {
        if let Some(arbiter) = &self.0 {
            arbiter.stop();
        }
    }
}
