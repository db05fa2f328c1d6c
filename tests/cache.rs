//! The caches of handlers: on a real Redis, and over the death of a worker.

#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

mod support;

use shardcron_actors::worker::caches;
use shardcron_sdk::cache::{CacheOptions, Caches, Kept, SharedLevel};
use shardcron_sdk::{Registry, ShardContext, ShardError, ShardHandler, ShardOutput, async_trait};
use shardcron_store::redis::RedisStores;
use shardcron_store::{Presence, SharedCache};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::Cluster;
use testkit::{wait_for, wait_until_some};
use tokio::sync::watch;

const BOUND: Duration = Duration::from_secs(25);

/// A source that counts how often it is asked.
#[derive(Clone, Default)]
struct Source(Arc<AtomicUsize>);

impl Source {
    async fn load(&self, value: Option<&str>) -> Result<Option<String>, ShardError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(value.map(str::to_owned))
    }

    fn asked(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// What is shared by processes: one Redis, a prefix of the test's own.
fn redis() -> RedisStores {
    RedisStores::open(testkit::shared().redis_url(), &testkit::unique_prefix()).unwrap()
}

/// The caches of one process.
fn process(redis: &RedisStores, options: CacheOptions) -> Caches {
    caches(options, Some(Arc::new(redis.cache())))
}

fn short() -> CacheOptions {
    let ms = Duration::from_millis;
    CacheOptions { fresh: ms(300), absent: ms(300), shared: Some(ms(1_500)), ..CacheOptions::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_is_loaded_once_for_all_processes_until_it_ends() {
    let (redis, source) = (redis(), Source::default());
    let (one, two) = (process(&redis, short()).cache("user"), process(&redis, short()).cache("user"));
    for _ in 0..3 {
        assert_eq!(one.get("17", source.load(Some("Ada"))).await.unwrap().as_deref(), Some("Ada"));
    }
    assert_eq!(two.get("17", source.load(Some("Ada"))).await.unwrap().as_deref(), Some("Ada"));
    assert_eq!(source.asked(), 1, "memory, and for the other process Redis");
    // A key that does not exist is known not to, in both.
    for cache in [&one, &one, &two] {
        assert_eq!(cache.get("99", source.load(None)).await.unwrap(), None);
    }
    assert_eq!(source.asked(), 2);
    // The memory's time ends before Redis', and Redis' time ends, too.
    redis.cache().forget("user", "17").await.unwrap();
    assert_eq!(one.get("17", source.load(Some("Bea"))).await.unwrap().as_deref(), Some("Ada"), "still in memory");
    let ends = async |wanted: &str| {
        loop {
            let found = one.get("17", source.load(Some(wanted))).await.unwrap();
            if found.as_deref() == Some(wanted) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(BOUND, ends("Bea")).await.unwrap();
    tokio::time::timeout(BOUND, ends("Cyd")).await.unwrap();
    assert_eq!(source.asked(), 4);
    // Changed by who has it: everybody who has not got it in memory sees it at once.
    one.put("17", &"Dee".to_owned()).await.unwrap();
    let three = process(&redis, short()).cache("user");
    assert_eq!(three.get("17", source.load(None)).await.unwrap().as_deref(), Some("Dee"));
    one.forget("17").await;
    assert_eq!(one.get("17", source.load(Some("Eve"))).await.unwrap().as_deref(), Some("Eve"));
    // Another cache is another one.
    let other = process(&redis, short()).cache("account");
    assert_eq!(other.get("17", source.load(None)).await.unwrap(), None);
}

/// Waits until so many have come to ask: what is loaded for the first of them is there for none before.
async fn all(asking: &watch::Sender<usize>, wanted: usize) {
    tokio::time::timeout(BOUND, asking.subscribe().wait_for(|asking| *asking == wanted)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_who_ask_at_once_load_once() {
    let (redis, source) = (redis(), Source::default());
    let cache = process(&redis, CacheOptions::default()).cache("user");
    let asking = watch::Sender::new(0);
    let ask = |_| {
        let (cache, source, asking) = (cache.clone(), source.clone(), asking.clone());
        tokio::spawn(async move {
            let load = async {
                all(&asking, 1_000).await;
                source.load(Some("Ada")).await
            };
            asking.send_modify(|asking| *asking += 1);
            cache.get::<String, _>("17", load).await.unwrap().unwrap()
        })
    };
    for answer in futures_util::future::join_all((0..1_000).map(ask)).await {
        assert_eq!(answer.unwrap(), "Ada");
    }
    assert_eq!(source.asked(), 1);
    // An error is everybody's and nobody keeps it.
    let asking = watch::Sender::new(0);
    let failing = |n: usize| {
        let (cache, source, asking) = (cache.clone(), source.clone(), asking.clone());
        tokio::spawn(async move {
            let load = async {
                let _: Option<String> = source.load(None).await?;
                all(&asking, 100).await;
                Err(ShardError::transient(format!("the source is away ({n})")))
            };
            asking.send_modify(|asking| *asking += 1);
            cache.get::<String, _>("18", load).await
        })
    };
    let answers = futures_util::future::join_all((0..100).map(failing)).await;
    assert!(answers.into_iter().all(|a| a.unwrap().is_err()));
    let asked = source.asked();
    assert!(asked < 20, "{asked} loads");
    assert_eq!(cache.get("18", source.load(Some("Bob"))).await.unwrap().as_deref(), Some("Bob"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_answers_for_keys_that_do_not_exist_and_large_values_are_not_kept() {
    let (redis, source) = (redis(), Source::default());
    let cache = process(&redis, CacheOptions::default()).cache("user");
    let keys: Vec<String> = (0..10_000).map(|n| n.to_string()).collect();
    cache.only_keys(&keys);
    for n in 10_000..11_000 {
        assert_eq!(cache.get(&n.to_string(), source.load(None)).await.unwrap(), None);
    }
    assert!(source.asked() < 40, "{} of 1,000 keys that do not exist were asked for", source.asked());
    assert_eq!(cache.get("17", source.load(Some("Ada"))).await.unwrap().as_deref(), Some("Ada"));
    cache.note_key("new");
    assert_eq!(cache.get("new", source.load(Some("Bob"))).await.unwrap().as_deref(), Some("Bob"));
    let before = source.asked();
    let large = "x".repeat(shardcron_domain::limits::CACHE_VALUE_BYTES + 1);
    let free = process(&redis, CacheOptions::default()).cache("large");
    for _ in 0..2 {
        assert_eq!(free.get("k", source.load(Some(&large))).await.unwrap().unwrap().len(), large.len());
    }
    assert_eq!(source.asked() - before, 2);
    assert!(free.get::<String, _>("", source.load(None)).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_the_memory_and_the_source_answer() {
    let away = RedisStores::open("redis://127.0.0.1:1/0", "x").unwrap();
    let events: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    struct Level(RedisStores);
    #[async_trait]
    impl SharedLevel for Level {
        async fn read(&self, cache: &str, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>, String> {
            self.0.cache().read(cache, keys).await.map_err(|e| e.to_string())
        }
        async fn write(&self, cache: &str, values: &[Kept]) -> Result<(), String> {
            self.0.cache().write(cache, values).await.map_err(|e| e.to_string())
        }
        async fn forget(&self, cache: &str, key: &str) -> Result<(), String> {
            self.0.cache().forget(cache, key).await.map_err(|e| e.to_string())
        }
    }
    let seen = events.clone();
    let watch = Box::new(move |cache: &str, event: shardcron_sdk::cache::CacheEvent| {
        assert_eq!(cache, "user");
        seen.lock().unwrap().push(event.word());
    });
    let caches = Caches::new(CacheOptions::default(), Some(Arc::new(Level(away))), Some(watch));
    let (cache, source) = (caches.cache("user"), Source::default());
    for _ in 0..2 {
        assert_eq!(cache.get("17", source.load(Some("Ada"))).await.unwrap().as_deref(), Some("Ada"));
    }
    assert_eq!(cache.preload(&["18".to_owned()]).await, 0);
    cache.forget("17").await;
    let counted = events.lock().unwrap().clone();
    let expected = ["shared_failed", "loaded", "shared_failed", "memory", "shared_failed", "shared_failed"];
    assert_eq!((source.asked(), counted.as_slice()), (1, expected.as_slice()));
}

/// Asks for one key until its worker dies; as a later attempt, once it may, and says where the value came from.
struct Asks;

#[async_trait]
impl ShardHandler for Asks {
    async fn run(&self, context: ShardContext) -> Result<ShardOutput, ShardError> {
        let path = |name: &str| context.params[name].as_str().unwrap_or_default().to_owned();
        let cache = context.cache("user");
        let load = |to: String| async move {
            std::fs::write(to, b"x").map_err(|e| ShardError::permanent(e.to_string()))?;
            Ok(Some("Ada".to_owned()))
        };
        if context.attempt.attempt == 1 {
            while !context.should_stop() {
                cache.get("17", load(path("first"))).await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            return Err(ShardError::stopped("told to stop"));
        }
        while !std::path::Path::new(&path("go")).exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let value: Option<String> = cache.get("17", load(path("again"))).await?;
        Ok(ShardOutput { summary: value.map(Into::into), ..ShardOutput::rows(1) })
    }
}

/// Not a test: the worker program of the test below, which starts it.
#[test]
#[ignore = "the worker of the other test"]
fn the_worker_program() {
    let arguments = ["shardcron", "worker"].map(std::ffi::OsString::from);
    let _ = shardcron::run_with(arguments, Registry::default().with("asks", Asks));
}

fn start_worker(cluster: &mut Cluster, name: &str) {
    let mut worker = Command::new(std::env::current_exe().unwrap());
    worker.args(["the_worker_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    cluster.start_program(worker, name);
}

/// Its hot keys travel in its heartbeats, and whoever goes on with its shard has them in memory before it asks.
#[test]
fn the_successor_of_a_dead_worker_has_its_hot_keys_in_memory() {
    let mut cluster = Cluster::on_services();
    let prefix = testkit::unique_prefix();
    cluster.set("SHARDCRON_REDIS_PREFIX", &prefix);
    let [first, go, again] = ["first", "go", "again"].map(|name| cluster.path(name));
    cluster.apply(&format!(
        "[job.asks]\nhandler = {{ rust = \"asks\" }}\nretry = {{ attempts = 5 }}\n\
         params = {{ first = \"{}\", go = \"{}\", again = \"{}\" }}\n",
        first.display(),
        go.display(),
        again.display()
    ));
    cluster.start("scheduler", "scheduler-1");
    start_worker(&mut cluster, "worker-1");
    cluster.wait_workers(1);
    let id = cluster.trigger("asks");
    let redis = RedisStores::open(testkit::shared().redis_url(), &prefix).unwrap();
    let hot = || {
        let workers = cluster.block_on(redis.presence().workers()).ok()?;
        workers.into_iter().map(|w| w.beat.hot_keys).find(|keys| !keys.is_empty())
    };
    assert_eq!(wait_until_some("the hot key in a heartbeat", BOUND, hot), [("user".to_owned(), "17".to_owned())]);
    start_worker(&mut cluster, "worker-2");
    cluster.wait_workers(2);
    cluster.kill("worker-1");
    cluster.wait_log("worker-2", "preloading the hot keys of a worker that was lost", BOUND);
    // The line is written before the keys are read.
    wait_for("the keys to be there", BOUND, || cluster.log("worker-2").contains("the hot keys are there"));
    cluster.block_on(redis.cache().forget("user", "17")).unwrap();
    std::fs::write(&go, b"").unwrap();
    let row = cluster.wait_end(id, BOUND);
    assert_eq!((row.succeeded, first.exists(), again.exists()), (1, true, false), "from memory, and from nowhere else");
}
