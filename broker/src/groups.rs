//! Messages that hold several shards: which of them are settled, how many shards messages hold, and how many shards a queue holds. Pure.

use shardcron_domain::limits::{GROUP_MAX, QUEUE_WINDOW_MAX};
use std::collections::{HashMap, VecDeque};

/// What is to be done about a message after one of its shards was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// All of it is settled.
    Ack,
    /// All of it is settled, some of it by giving it back.
    Requeue,
    /// Some of it is open, or it was answered before.
    NotYet,
}

/// The messages of one channel that hold several shards. Bounded by the prefetch.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    open: HashMap<u64, Open>,
}

#[derive(Debug)]
struct Open {
    /// A bit for each shard that is not settled.
    parts: u64,
    requeue: bool,
}

impl Groups {
    /// Notes a message with so many shards. One with a single shard need not be noted.
    pub(crate) fn open(&mut self, message: u64, parts: u32) {
        if parts > 1 {
            let parts = u64::MAX >> (64 - parts.min(GROUP_MAX));
            self.open.insert(message, Open { parts, requeue: false });
        }
    }

    /// Settles a shard of a message. Settling it twice changes nothing.
    pub(crate) fn settle(&mut self, message: u64, part: u32, requeue: bool) -> Settled {
        let whole = if requeue { Settled::Requeue } else { Settled::Ack };
        let Some(open) = self.open.get_mut(&message) else {
            // A message with one shard. That of a group has other parts, too; a late word about them is not about a message.
            return if part == 0 { whole } else { Settled::NotYet };
        };
        let bit = 1_u64.checked_shl(part).unwrap_or(0);
        if open.parts & bit == 0 {
            return Settled::NotYet;
        }
        open.parts &= !bit;
        open.requeue |= requeue;
        if open.parts != 0 {
            return Settled::NotYet;
        }
        let requeue = open.requeue;
        self.open.remove(&message);
        if requeue { Settled::Requeue } else { Settled::Ack }
    }
}

/// How many shards the messages of a queue hold, as seen by a consumer of it. A prefetch is counted in messages at the server and in shards
/// by who asks for it.
#[derive(Debug)]
pub(crate) struct Sizes {
    /// A power of two.
    each: u32,
    /// Messages in a row of which the size is smaller.
    smaller: u64,
}

/// So many messages in a row must be smaller before more of them are asked for: one retry among groups changes nothing, and each
/// change of the prefetch is a new consumer.
const SMALLER_FOR: u64 = 64;

impl Default for Sizes {
    fn default() -> Self {
        Sizes { each: 1, smaller: 0 }
    }
}

impl Sizes {
    /// Takes in an arrival. Larger messages count at once: a hoard hurts more than a consumer that waits for a moment.
    pub(crate) fn observe(&mut self, messages: u64, shards: u64) {
        if messages == 0 {
            return;
        }
        let mean =
            u32::try_from(shards.div_ceil(messages)).unwrap_or(GROUP_MAX).clamp(1, GROUP_MAX).next_power_of_two();
        if mean >= self.each {
            (self.each, self.smaller) = (mean, 0);
            return;
        }
        self.smaller += messages;
        if self.smaller >= SMALLER_FOR {
            (self.each, self.smaller) = (mean, 0);
        }
    }

    /// How many messages hold so many shards, rounded up.
    pub(crate) fn messages(&self, shards: u16) -> u16 {
        u16::try_from(u32::from(shards).div_ceil(self.each)).unwrap_or(u16::MAX)
    }
}

/// What was published to a queue, newest last, as far as it may still stand there: how many shards its ready messages hold.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    /// Messages in a row of the same size.
    runs: VecDeque<(u32, u32)>,
}

/// More runs than a queue within its window holds.
const RUNS_MAX: usize = QUEUE_WINDOW_MAX as usize;

impl Backlog {
    /// Notes a message that was confirmed.
    pub(crate) fn published(&mut self, shards: u32) {
        match self.runs.back_mut() {
            Some((messages, size)) if *size == shards => *messages = messages.saturating_add(1),
            _ => self.runs.push_back((1, shards)),
        }
        if self.runs.len() > RUNS_MAX {
            self.runs.pop_front();
        }
    }

    /// How many shards that many ready messages hold: those that were published last. What is older is forgotten. Messages that were
    /// not published from here count as one shard each.
    pub(crate) fn shards(&mut self, ready: u32) -> u32 {
        let (mut left, mut shards, mut kept) = (ready, 0_u32, 0);
        for (messages, size) in self.runs.iter_mut().rev() {
            if left == 0 {
                break;
            }
            *messages = (*messages).min(left);
            left -= *messages;
            shards = shards.saturating_add(messages.saturating_mul(*size));
            kept += 1;
        }
        self.runs.drain(..self.runs.len() - kept);
        shards.saturating_add(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_message_is_acked_with_its_last_shard() {
        let mut groups = Groups::default();
        groups.open(7, 3);
        assert_eq!(groups.settle(7, 2, false), Settled::NotYet);
        assert_eq!(groups.settle(7, 2, false), Settled::NotYet, "settled already");
        assert_eq!(groups.settle(7, 0, false), Settled::NotYet);
        assert_eq!(groups.settle(7, 1, false), Settled::Ack);
        assert_eq!(groups.settle(8, 0, false), Settled::Ack, "a message with one shard");
    }

    #[test]
    fn what_is_partly_given_back_goes_back_when_nothing_of_it_is_open() {
        let mut groups = Groups::default();
        groups.open(7, 64);
        assert_eq!(groups.settle(7, 63, true), Settled::NotYet);
        for part in 0..62 {
            assert_eq!(groups.settle(7, part, false), Settled::NotYet);
        }
        assert_eq!(groups.settle(7, 62, false), Settled::Requeue);
    }

    #[test]
    fn a_prefetch_follows_what_messages_hold() {
        let mut sizes = Sizes::default();
        assert_eq!(sizes.messages(1_024), 1_024);
        sizes.observe(10, 640);
        assert_eq!((sizes.messages(1_024), sizes.messages(8), sizes.messages(65)), (16, 1, 2));
        sizes.observe(1, 1);
        assert_eq!(sizes.messages(1_024), 16, "one small message among large ones changes nothing");
        sizes.observe(63, 63);
        assert_eq!(sizes.messages(1_024), 1_024);
    }

    #[test]
    fn a_queue_holds_what_was_published_last() {
        let mut backlog = Backlog::default();
        for shards in [64, 64, 64, 1, 1, 32] {
            backlog.published(shards);
        }
        assert_eq!(backlog.shards(4), 32 + 1 + 1 + 64);
        assert_eq!(backlog.shards(6), 32 + 1 + 1 + 64 + 2, "what has been forgotten counts as one each");
        assert_eq!(backlog.shards(0), 0);
        assert_eq!(backlog.shards(3), 3, "another leader published these");
    }

    proptest! {
        #[test]
        fn a1_nothing_is_answered_before_all_of_it_is_settled(
            parts in 1u32..=64, order in prop::collection::vec((0u32..64, any::<bool>()), 0..300)
        ) {
            let mut groups = Groups::default();
            groups.open(1, parts);
            let (mut open, mut requeue, mut answers) = ((0..parts).collect::<std::collections::BTreeSet<_>>(), false, 0);
            for (part, back) in order.into_iter().filter(|(part, _)| *part < parts) {
                if answers > 0 {
                    break;
                }
                let fresh = open.remove(&part);
                requeue |= fresh && back;
                let settled = groups.settle(1, part, back);
                let expected = match (open.is_empty() && fresh, requeue) {
                    (false, _) => Settled::NotYet,
                    (true, true) => Settled::Requeue,
                    (true, false) => Settled::Ack,
                };
                prop_assert_eq!(settled, expected);
                answers += u32::from(settled != Settled::NotYet);
            }
        }

        #[test]
        fn a_backlog_is_exact_for_what_it_has_seen(sizes in prop::collection::vec(1u32..=64, 0..200), gone in 0usize..200) {
            let mut backlog = Backlog::default();
            sizes.iter().for_each(|size| backlog.published(*size));
            let left = &sizes[gone.min(sizes.len())..];
            prop_assert_eq!(backlog.shards(left.len() as u32), left.iter().sum::<u32>());
        }
    }
}
