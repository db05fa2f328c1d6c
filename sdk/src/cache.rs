//! The cache that a handler has: values that many records and many attempts need, read from their source as rarely as possible.
//!
//! Two levels: this process's memory for a minute, and what all workers share (Redis) for five to six. A key that does not exist is
//! remembered for half a minute. However many ask for a key at once, one of them loads it. Nothing here is needed for a right result:
//! where a level is away, the other one or the source answers.

use async_trait::async_trait;
use fastbloom::BloomFilter;
use moka::Expiry;
use moka::future::Cache as Memory;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shardcron_domain::cache::{check_cache, check_key, shared_ms};
use shardcron_domain::hot_keys::HotKeys;
use shardcron_domain::limits::{
    CACHE_ABSENT_MS, CACHE_BATCH, CACHE_BYTES, CACHE_FILTER_KEYS, CACHE_FRESH_MS, CACHE_VALUE_BYTES, CACHES_MAX,
    HOT_KEYS_KEPT,
};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::handler::ShardError;

/// The first byte of what the second level holds: a key that does not exist, or a value as JSON behind it.
const ABSENT: u8 = 0;
const VALUE: u8 = 1;
/// Share of keys that do not exist and that the filter lets through.
const FILTER_MISSES: f64 = 0.01;
/// What an entry of the memory costs beside its bytes.
const ENTRY_BYTES: usize = 128;

/// A value to be kept, with its key and for how long.
pub type Kept = (String, Vec<u8>, Duration);

/// The level that all workers share. An error is a reason, not a failure: the key counts as unknown.
#[async_trait]
pub trait SharedLevel: Send + Sync + 'static {
    /// What is kept under the keys, in their order.
    ///
    /// # Errors
    /// Why it can't be read.
    async fn read(&self, cache: &str, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, String>;
    /// Keeps values.
    ///
    /// # Errors
    /// Why they can't be kept.
    async fn write(&self, cache: &str, values: &[Kept]) -> Result<(), String>;
    /// Forgets a key.
    ///
    /// # Errors
    /// Why it can't be forgotten; it ends by itself.
    async fn forget(&self, cache: &str, key: &str) -> Result<(), String>;
}

/// Loads the values of a cache from their source, many at a time, where a job has its keys preloaded. See
/// [`ShardHandler::cache_loader`](crate::ShardHandler::cache_loader).
#[async_trait]
pub trait CacheLoader: Send + Sync + 'static {
    /// The values under these keys, 500 at most, as what [`Cache::get`] would be told by its own load: each key that exists, with its
    /// value as JSON. A key that is left out is known not to exist, for half a minute. May be dropped before it has ended.
    ///
    /// # Errors
    /// Why the source can't be asked: nothing is kept then, and the attempt begins without.
    async fn load(&self, keys: &[String]) -> Result<Vec<(String, serde_json::Value)>, ShardError>;
}

/// What became of one question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// It was in this process's memory.
    Memory,
    /// Somebody else was loading it, and it came with that.
    Together,
    /// It was in the shared level.
    Shared,
    /// It came from its source.
    Loaded,
    /// The source could not be asked.
    LoadFailed,
    /// The filter knows that there is no such key.
    Filtered,
    /// The shared level did not answer, or could not keep it. Counted beside what became of the question.
    SharedFailed,
    /// It is too large to be kept.
    TooLarge,
}

impl CacheEvent {
    /// The label of the metric.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            CacheEvent::Memory => "memory",
            CacheEvent::Together => "together",
            CacheEvent::Shared => "shared",
            CacheEvent::Loaded => "loaded",
            CacheEvent::LoadFailed => "load_failed",
            CacheEvent::Filtered => "filtered",
            CacheEvent::SharedFailed => "shared_failed",
            CacheEvent::TooLarge => "too_large",
        }
    }
}

/// How long things are kept, and how much of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// In memory.
    pub fresh: Duration,
    /// That a key does not exist, in both levels.
    pub absent: Duration,
    /// In the shared level, before the spread; `None`: five minutes and up to one more.
    pub shared: Option<Duration>,
    /// Bytes of one cache in memory.
    pub bytes: u64,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions {
            fresh: Duration::from_millis(CACHE_FRESH_MS),
            absent: Duration::from_millis(CACHE_ABSENT_MS),
            shared: None,
            bytes: CACHE_BYTES,
        }
    }
}

/// All caches of a process. Clones share everything.
#[derive(Clone, Default)]
pub struct Caches {
    all: Arc<All>,
}

type Watch = dyn Fn(&str, CacheEvent) + Send + Sync;

#[derive(Default)]
struct All {
    options: CacheOptions,
    shared: Option<Arc<dyn SharedLevel>>,
    watch: Option<Box<Watch>>,
    named: Mutex<BTreeMap<String, Arc<Named>>>,
    hot: Mutex<HotKeys>,
    draws: AtomicU64,
    seed: RandomState,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Caches {
    /// With a level that others share, if there is one, and with somebody who counts, if anybody does.
    #[must_use]
    pub fn new(options: CacheOptions, shared: Option<Arc<dyn SharedLevel>>, watch: Option<Box<Watch>>) -> Self {
        Caches { all: Arc::new(All { options, shared, watch, ..All::default() }) }
    }

    /// The cache of a name. Its names are few and fixed in the program: they are labels of metrics. One with a name that can't be one,
    /// and one too many, keeps nothing and loads always.
    #[must_use]
    pub fn cache(&self, name: &str) -> Cache {
        let mut named = lock(&self.all.named);
        let known = named.get(name).cloned();
        let room = named.len() < CACHES_MAX && check_cache(name).is_ok();
        let of = known.or_else(|| {
            room.then(|| {
                let new = Arc::new(Named::new(name, self.all.options.bytes));
                named.insert(name.to_owned(), new.clone());
                new
            })
        });
        Cache { all: self.all.clone(), of }
    }

    /// The keys that were asked for most lately; each call lets earlier heat fade.
    #[must_use]
    pub fn hot_keys(&self) -> Vec<(String, String)> {
        let mut hot = lock(&self.all.hot);
        let top = hot.top(HOT_KEYS_KEPT);
        hot.fade();
        top
    }

    /// Brings keys of several caches from the shared level into memory; returns how many it had.
    pub async fn preload(&self, keys: impl IntoIterator<Item = (String, String)>) -> usize {
        let mut by_cache: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (cache, key) in keys {
            by_cache.entry(cache).or_default().push(key);
        }
        let mut found = 0;
        for (cache, keys) in by_cache {
            found += self.cache(&cache).preload(&keys).await;
        }
        found
    }
}

#[derive(Clone)]
struct Entry {
    /// JSON; `None`: there is no such key.
    json: Option<Arc<[u8]>>,
    keep: Duration,
}

struct Keep;

impl Expiry<String, Entry> for Keep {
    fn expire_after_create(&self, _: &String, entry: &Entry, _: Instant) -> Option<Duration> {
        Some(entry.keep)
    }

    fn expire_after_update(&self, _: &String, entry: &Entry, _: Instant, _: Option<Duration>) -> Option<Duration> {
        Some(entry.keep)
    }
}

struct Named {
    name: String,
    memory: Memory<String, Entry>,
    /// Held by who loads many: what one shard loads, the next one finds.
    loading: tokio::sync::Mutex<()>,
    filter: RwLock<Option<BloomFilter>>,
}

impl Named {
    fn new(name: &str, bytes: u64) -> Self {
        let weigh = |key: &String, entry: &Entry| {
            let value = entry.json.as_ref().map_or(0, |json| json.len());
            u32::try_from(key.len() + value + ENTRY_BYTES).unwrap_or(u32::MAX)
        };
        let memory = Memory::builder().max_capacity(bytes).weigher(weigh).expire_after(Keep).build();
        Named { name: name.to_owned(), memory, loading: tokio::sync::Mutex::default(), filter: RwLock::new(None) }
    }

    /// Those that are no mistakes and not in memory.
    fn lacking(&self, keys: &[String]) -> Vec<String> {
        let lacks = |key: &&String| check_key(key).is_ok() && !self.memory.contains_key(*key) && !self.excluded(key);
        keys.iter().filter(lacks).cloned().collect()
    }

    fn excluded(&self, key: &str) -> bool {
        let filter = self.filter.read().unwrap_or_else(PoisonError::into_inner);
        filter.as_ref().is_some_and(|filter| !filter.contains(key))
    }
}

/// One named cache.
#[derive(Clone)]
pub struct Cache {
    all: Arc<All>,
    /// `None`: one too many.
    of: Option<Arc<Named>>,
}

impl Cache {
    /// The value under a key; `None` if there is no such key. `load` is asked if no level knows, by one caller for all who ask at the
    /// time; it must bear being dropped and asked again. An error of it is everybody's, and is not kept.
    ///
    /// # Errors
    /// What `load` says; a key that can't be one.
    pub async fn get<T, F>(&self, key: &str, load: F) -> Result<Option<T>, ShardError>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<Option<T>, ShardError>> + Send,
    {
        check_key(key).map_err(ShardError::permanent)?;
        let Some(of) = &self.of else { return load.await };
        if of.excluded(key) {
            self.count(CacheEvent::Filtered);
            return Ok(None);
        }
        // A count that is missed where many ask at once is no loss; waiting for it would be one.
        if let Ok(mut hot) = self.all.hot.try_lock() {
            hot.hit(&of.name, key);
        }
        if let Some(entry) = of.memory.get(key).await {
            match decode(&entry) {
                Ok(value) => {
                    self.count(CacheEvent::Memory);
                    return Ok(value);
                }
                // As another version of the program wrote it.
                Err(_) => of.memory.invalidate(key).await,
            }
        }
        let led = AtomicBool::new(false);
        let find = async {
            led.store(true, Ordering::Relaxed);
            self.find(of, key, load).await
        };
        let entry = of.memory.try_get_with(key.to_owned(), find).await.map_err(|shared| (*shared).clone())?;
        if !led.load(Ordering::Relaxed) {
            self.count(CacheEvent::Together);
        }
        decode(&entry).map_err(|e| {
            ShardError::permanent(format!(
                "cache '{}' holds something else under '{key}' ({e}); use another name",
                of.name
            ))
        })
    }

    /// Keeps a value that the handler has anyway.
    ///
    /// # Errors
    /// A key that can't be one; a value that is no JSON.
    pub async fn put<T: Serialize + Sync>(&self, key: &str, value: &T) -> Result<(), ShardError> {
        check_key(key).map_err(ShardError::permanent)?;
        let Some(of) = &self.of else { return Ok(()) };
        let entry = self.entry(Some(value))?;
        self.share(of, self.kept(key, &entry)).await;
        self.note_key(key);
        of.memory.insert(key.to_owned(), entry).await;
        Ok(())
    }

    /// Forgets a key here and in the shared level, since it has changed. Other processes keep what they have in memory for up to a
    /// minute more.
    pub async fn forget(&self, key: &str) {
        let Some(of) = &self.of else { return };
        of.memory.invalidate(key).await;
        if let Some(shared) = &self.all.shared
            && shared.forget(&of.name, key).await.is_err()
        {
            self.count(CacheEvent::SharedFailed);
        }
    }

    /// Says which keys there are: all others are known not to exist without being asked for. About one in a hundred of those is asked
    /// for nevertheless. A key that comes to be must be told with [`Cache::note_key`], or is not found. At most ten million keys; with
    /// more there is no filter.
    pub fn only_keys<K: AsRef<str>>(&self, keys: &[K]) {
        let Some(of) = &self.of else { return };
        let filter = (keys.len() <= CACHE_FILTER_KEYS).then(|| {
            let mut filter = BloomFilter::with_false_pos(FILTER_MISSES).expected_items(keys.len().max(1));
            keys.iter().for_each(|key| {
                filter.insert(key.as_ref());
            });
            filter
        });
        *of.filter.write().unwrap_or_else(PoisonError::into_inner) = filter;
    }

    /// Tells the filter, if there is one, of a key that has come to be.
    pub fn note_key(&self, key: &str) {
        let Some(of) = &self.of else { return };
        if let Some(filter) = of.filter.write().unwrap_or_else(PoisonError::into_inner).as_mut() {
            filter.insert(key);
        }
    }

    /// Brings what the shared level has of these keys into memory; returns how many. Never fails: it is there to help.
    pub async fn preload(&self, keys: &[String]) -> usize {
        let (Some(of), Some(shared)) = (&self.of, &self.all.shared) else { return 0 };
        let wanted = of.lacking(keys);
        let mut found = 0;
        for some in wanted.chunks(CACHE_BATCH) {
            let Ok(values) = shared.read(&of.name, some).await else {
                self.count(CacheEvent::SharedFailed);
                return found;
            };
            for (key, value) in some.iter().zip(values) {
                if let Some(entry) = value.and_then(|bytes| self.shared_entry(&bytes)) {
                    of.memory.insert(key.clone(), entry).await;
                    found += 1;
                }
            }
        }
        found
    }

    /// The same, and what the shared level does not have comes from the source and is shared. Shards of one process that want the same
    /// keys at once load them once.
    ///
    /// # Errors
    /// What the loader says; what had been loaded before is kept.
    pub async fn preload_from(&self, keys: &[String], loader: &dyn CacheLoader) -> Result<usize, ShardError> {
        let Some(of) = &self.of else { return Ok(0) };
        let _alone = of.loading.lock().await;
        let mut found = self.preload(keys).await;
        for some in of.lacking(keys).chunks(CACHE_BATCH) {
            let values = loader.load(some).await.inspect_err(|_| self.count(CacheEvent::LoadFailed))?;
            let mut values: BTreeMap<String, serde_json::Value> = values.into_iter().collect();
            let mut shared = Vec::with_capacity(some.len());
            for key in some {
                let entry = self.entry(values.remove(key).as_ref())?;
                self.count(CacheEvent::Loaded);
                if let Some(kept) = self.kept(key, &entry) {
                    shared.push(kept);
                    of.memory.insert(key.clone(), entry).await;
                    found += 1;
                }
            }
            self.share(of, shared).await;
        }
        Ok(found)
    }

    fn count(&self, event: CacheEvent) {
        if let (Some(watch), Some(of)) = (&self.all.watch, &self.of) {
            watch(&of.name, event);
        }
    }

    /// The shared level, then the source.
    async fn find<T, F>(&self, of: &Named, key: &str, load: F) -> Result<Entry, ShardError>
    where
        T: Serialize + DeserializeOwned + Send,
        F: Future<Output = Result<Option<T>, ShardError>> + Send,
    {
        if let Some(entry) = self.shared_find(of, key).await
            && decode::<T>(&entry).is_ok()
        {
            self.count(CacheEvent::Shared);
            return Ok(entry);
        }
        let value = load.await.inspect_err(|_| self.count(CacheEvent::LoadFailed))?;
        self.count(CacheEvent::Loaded);
        let entry = self.entry(value.as_ref())?;
        self.share(of, self.kept(key, &entry)).await;
        Ok(entry)
    }

    async fn shared_find(&self, of: &Named, key: &str) -> Option<Entry> {
        let shared = self.all.shared.as_ref()?;
        match shared.read(&of.name, &[key.to_owned()]).await {
            Ok(values) => values.into_iter().next().flatten().and_then(|bytes| self.shared_entry(&bytes)),
            Err(_) => {
                self.count(CacheEvent::SharedFailed);
                None
            }
        }
    }

    fn shared_entry(&self, bytes: &[u8]) -> Option<Entry> {
        match bytes.split_first()? {
            (&VALUE, json) => Some(Entry { json: Some(json.into()), keep: self.all.options.fresh }),
            (&ABSENT, []) => Some(Entry { json: None, keep: self.all.options.absent }),
            _ => None,
        }
    }

    fn entry<T: Serialize>(&self, value: Option<&T>) -> Result<Entry, ShardError> {
        let Some(value) = value else { return Ok(Entry { json: None, keep: self.all.options.absent }) };
        let json = serde_json::to_vec(value)
            .map_err(|e| ShardError::permanent(format!("a value of a cache can't be written as JSON: {e}")))?;
        // Given to whoever waits for it, and gone at once.
        let keep = if json.len() > CACHE_VALUE_BYTES { Duration::ZERO } else { self.all.options.fresh };
        Ok(Entry { json: Some(json.into()), keep })
    }

    /// An entry as the shared level keeps it; `None` if it is too large to be kept anywhere.
    fn kept(&self, key: &str, entry: &Entry) -> Option<Kept> {
        if entry.keep.is_zero() {
            self.count(CacheEvent::TooLarge);
            return None;
        }
        let (bytes, keep) = match &entry.json {
            Some(json) => ([&[VALUE][..], &json[..]].concat(), self.shared_keep()),
            None => (vec![ABSENT], self.all.options.absent),
        };
        Some((key.to_owned(), bytes, keep))
    }

    async fn share(&self, of: &Named, values: impl IntoIterator<Item = Kept>) {
        let (Some(shared), values) = (&self.all.shared, values.into_iter().collect::<Vec<_>>()) else { return };
        if !values.is_empty() && shared.write(&of.name, &values).await.is_err() {
            self.count(CacheEvent::SharedFailed);
        }
    }

    fn shared_keep(&self) -> Duration {
        let draw = self.all.seed.hash_one(self.all.draws.fetch_add(1, Ordering::Relaxed));
        self.all.options.shared.unwrap_or_else(|| Duration::from_millis(shared_ms(draw)))
    }
}

fn decode<T: DeserializeOwned>(entry: &Entry) -> Result<Option<T>, serde_json::Error> {
    entry.json.as_deref().map(serde_json::from_slice).transpose()
}
