//! Which deliveries of one channel are settled, and the fewest frames that tell the broker. Pure.

use std::collections::BTreeSet;

/// One acknowledgement frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The delivery.
    pub tag: u64,
    /// With all unanswered ones below it.
    pub multiple: bool,
}

/// The deliveries of one channel. Its tags run 1, 2, 3, … in the order of delivery, over all consumers of the channel.
#[derive(Debug, Default)]
pub(super) struct AckTracker {
    /// Every tag up to here is settled and answered.
    floor: u64,
    /// Every tag up to here has been delivered.
    delivered: u64,
    /// Tags above the floor that are settled and answered.
    answered: BTreeSet<u64>,
}

impl AckTracker {
    /// Notes a delivery.
    pub(super) fn delivered(&mut self, tag: u64) {
        self.delivered = self.delivered.max(tag);
    }

    /// Settles deliveries; tags that are unknown or already settled are passed over.
    ///
    /// One `multiple` frame covers everything below the first delivery that is still open. Its tag must itself be unanswered: the
    /// broker looks it up, and closes the channel when it does not find it.
    pub(super) fn ack(&mut self, tags: impl IntoIterator<Item = u64>) -> Vec<Frame> {
        let fresh = self.fresh(tags);
        let floor = self.floor_with(&fresh);
        let covered = fresh.range(..=floor).next_back().copied();
        let covered_count = fresh.range(..=floor).take(2).count();
        let mut frames = Vec::new();
        if let Some(tag) = covered {
            frames.push(Frame { tag, multiple: covered_count > 1 });
        }
        frames.extend(fresh.range(floor + 1..).map(|&tag| Frame { tag, multiple: false }));
        self.settle(fresh, floor);
        frames
    }

    /// Gives deliveries back: one frame each, since `multiple` would give back what is still worked on.
    pub(super) fn requeue(&mut self, tags: impl IntoIterator<Item = u64>) -> Vec<Frame> {
        let fresh = self.fresh(tags);
        let frames = fresh.iter().map(|&tag| Frame { tag, multiple: false }).collect();
        let floor = self.floor_with(&fresh);
        self.settle(fresh, floor);
        frames
    }

    fn fresh(&self, tags: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
        let known = |tag: &u64| *tag > self.floor && *tag <= self.delivered && !self.answered.contains(tag);
        tags.into_iter().filter(known).collect()
    }

    fn floor_with(&self, fresh: &BTreeSet<u64>) -> u64 {
        let mut floor = self.floor;
        while fresh.contains(&(floor + 1)) || self.answered.contains(&(floor + 1)) {
            floor += 1;
        }
        floor
    }

    fn settle(&mut self, fresh: BTreeSet<u64>, floor: u64) {
        self.answered.extend(fresh);
        self.answered = self.answered.split_off(&(floor + 1));
        self.floor = floor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn single(tag: u64) -> Frame {
        Frame { tag, multiple: false }
    }

    fn multiple(tag: u64) -> Frame {
        Frame { tag, multiple: true }
    }

    fn tracker(delivered: u64) -> AckTracker {
        let mut tracker = AckTracker::default();
        tracker.delivered(delivered);
        tracker
    }

    #[test]
    fn a_settled_prefix_is_one_frame() {
        let mut t = tracker(10);
        assert_eq!(t.ack(1..=10), [multiple(10)]);
        assert_eq!(t.ack(1..=10), []);
    }

    #[test]
    fn above_an_open_delivery_each_has_its_own() {
        let mut t = tracker(6);
        assert_eq!(t.ack([1, 2, 4, 6]), [multiple(2), single(4), single(6)]);
        // 6 is answered already, so the frame that closes the gap must not name it.
        assert_eq!(t.ack([3, 5]), [multiple(5)]);
        assert_eq!(t.ack([3]), []);
    }

    #[test]
    fn the_gap_alone_is_a_single_frame() {
        let mut t = tracker(3);
        assert_eq!(t.ack([2, 3]), [single(2), single(3)]);
        assert_eq!(t.ack([1]), [single(1)]);
    }

    #[test]
    fn what_was_never_delivered_is_not_acked() {
        let mut t = tracker(2);
        assert_eq!(t.ack([0, 1, 2, 3, u64::MAX]), [multiple(2)]);
    }

    #[test]
    fn what_is_given_back_is_not_acked_later() {
        let mut t = tracker(3);
        assert_eq!(t.requeue([2]), [single(2)]);
        assert_eq!(t.ack([2]), []);
        assert_eq!(t.ack([1, 3]), [multiple(3)]);
    }

    /// The broker's side: what it holds unacked, and its refusal of unknown tags.
    fn receive(unacked: &mut BTreeSet<u64>, frame: Frame) -> Result<(), TestCaseError> {
        prop_assert!(unacked.contains(&frame.tag), "unknown delivery tag {}", frame.tag);
        if frame.multiple {
            *unacked = unacked.split_off(&(frame.tag + 1));
        } else {
            unacked.remove(&frame.tag);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn the_broker_keeps_exactly_what_is_open(
            steps in prop::collection::vec((0u64..8, prop::collection::vec(0u64..80, 0..12), any::<bool>()), 0..40)
        ) {
            let mut tracker = AckTracker::default();
            let (mut delivered, mut unacked, mut open) = (0, BTreeSet::new(), BTreeSet::new());
            for (more, tags, ack) in steps {
                for tag in delivered + 1..=delivered + more {
                    unacked.insert(tag);
                    open.insert(tag);
                    tracker.delivered(tag);
                }
                delivered += more;
                let frames = if ack { tracker.ack(tags.clone()) } else { tracker.requeue(tags.clone()) };
                prop_assert!(frames.len() <= tags.len());
                for frame in frames {
                    receive(&mut unacked, frame)?;
                }
                for tag in &tags {
                    open.remove(tag);
                }
                prop_assert_eq!(&unacked, &open);
            }
        }
    }
}
