//! The only dice of the actors.

use uuid::Uuid;

/// Draws. A trait, so that whole systems can run from a seed: what an actor draws elsewhere makes a simulated life impossible to
/// see again.
pub trait Entropy: Send + Sync + 'static {
    /// Any number.
    fn draw(&self) -> u64;
    /// A new UUID of version 7: sorts by the time it was made.
    fn id(&self) -> Uuid;
}

/// The host's.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn draw(&self) -> u64 {
        rand::random()
    }

    fn id(&self) -> Uuid {
        Uuid::now_v7()
    }
}
