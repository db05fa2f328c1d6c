//! Which keys are asked for most: a bounded count of them, kept by a worker and handed on with its heartbeats.

use crate::limits::{HOT_KEY_BYTES, HOT_KEYS_COUNTED};
use std::collections::HashMap;

/// A count that forgets the rarest: a key that comes when the table is full takes the place, and the count, of the one that was asked
/// for least. So the frequent ones are in it for certain, and the rare ones come and go.
#[derive(Clone, Debug, Default)]
pub struct HotKeys {
    counts: HashMap<(String, String), u64>,
}

impl HotKeys {
    /// Notes that a key of a cache was asked for. Long keys are left out: they would not fit into a heartbeat.
    pub fn hit(&mut self, cache: &str, key: &str) {
        if key.len() > HOT_KEY_BYTES {
            return;
        }
        // Looked up by a pair that has to be made: the table is small, and a hit of the first level costs more.
        let key = (cache.to_owned(), key.to_owned());
        if let Some(count) = self.counts.get_mut(&key) {
            *count = count.saturating_add(1);
            return;
        }
        let mut count = 1;
        if self.counts.len() >= HOT_KEYS_COUNTED {
            let rarest = self.counts.iter().min_by(|a, b| (a.1, a.0).cmp(&(b.1, b.0))).map(|(k, n)| (k.clone(), *n));
            if let Some((rarest, least)) = rarest {
                self.counts.remove(&rarest);
                count = least.saturating_add(1);
            }
        }
        self.counts.insert(key, count);
    }

    /// The keys that were asked for most, first the hottest. What was asked for once is not hot.
    #[must_use]
    pub fn top(&self, most: usize) -> Vec<(String, String)> {
        let mut all: Vec<(&(String, String), u64)> =
            self.counts.iter().filter(|(_, n)| **n > 1).map(|(k, n)| (k, *n)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
        all.into_iter().take(most).map(|(key, _)| key.clone()).collect()
    }

    /// Halves all counts, so that what was hot an hour ago makes place for what is hot now.
    pub fn fade(&mut self) {
        self.counts.retain(|_, count| {
            *count /= 2;
            *count > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frequent_stay_and_the_table_is_bounded() {
        let mut hot = HotKeys::default();
        for n in 0..20_000 {
            hot.hit("user", &format!("rare-{n}"));
            hot.hit("user", &format!("hot-{}", n % 3));
        }
        assert!(hot.counts.len() <= HOT_KEYS_COUNTED);
        let top = hot.top(3);
        let mut keys: Vec<&str> = top.iter().map(|(_, key)| key.as_str()).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["hot-0", "hot-1", "hot-2"]);
        hot.hit("user", &"x".repeat(HOT_KEY_BYTES + 1));
        assert!(hot.counts.keys().all(|(_, key)| key.len() <= HOT_KEY_BYTES));
    }

    #[test]
    fn what_was_asked_for_once_is_not_hot_and_heat_fades() {
        let mut hot = HotKeys::default();
        (0..4).for_each(|_| hot.hit("a", "old"));
        hot.hit("a", "once");
        assert_eq!(hot.top(10), [("a".to_owned(), "old".to_owned())]);
        (0..3).for_each(|_| hot.fade());
        assert!(hot.top(10).is_empty());
    }
}
