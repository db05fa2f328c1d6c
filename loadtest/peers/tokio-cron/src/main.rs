//! tokio-cron-scheduler: cron jobs in memory, each at one second of the minute.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio_cron_scheduler::{Job, JobScheduler};

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

fn argument(name: &str) -> u64 {
    let mut all = std::env::args();
    all.find(|a| a == name);
    all.next().and_then(|v| v.parse().ok()).unwrap_or(0)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (jobs, seconds) = (argument("--jobs"), argument("--seconds"));
    let seen: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
    let scheduler = JobScheduler::new().await?;
    for job in 0..jobs {
        let (second, seen) = (job % 60, seen.clone());
        let run = move |_, _| {
            let seen = seen.clone();
            Box::pin(async move {
                if let Ok(mut seen) = seen.lock() {
                    seen.push((now_ms(), second));
                }
            }) as std::pin::Pin<Box<dyn Future<Output = ()> + Send>>
        };
        scheduler.add(Job::new_async(format!("{second} * * * * *"), run)?).await?;
    }
    scheduler.start().await?;
    let begin = (now_ms() / 1_000 + 5) * 1_000;
    let end = begin + seconds * 1_000;
    tokio::time::sleep(Duration::from_millis(begin - now_ms())).await;
    let before = cpu_seconds();
    tokio::time::sleep(Duration::from_millis(end.saturating_sub(now_ms()))).await;
    let cores = (cpu_seconds() - before) / seconds as f64;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let behind = |(at, second): &(u64, u64)| (at + 60_000 - second * 1_000) % 60_000;
    let seen = seen.lock().map(|seen| seen.clone()).unwrap_or_default();
    let mut late: Vec<u64> =
        seen.iter().filter(|s| (begin..end).contains(&(s.0 - behind(s)))).map(behind).collect();
    late.sort_unstable();
    let due = |second: u64| (begin / 1_000..end / 1_000).filter(|s| s % 60 == second).count() as u64;
    let wanted: u64 = (0..jobs).map(|job| due(job % 60)).sum();
    let rank = |percent: usize| late.get((late.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0);
    println!(
        "{{\"name\":\"tokio-cron-scheduler 0.15\",\"jobs\":{jobs},\"lateness_ms\":{{\"p50\":{},\"p99\":{},\"max\":{}}},\
         \"fired\":{},\"missed\":{},\"cpu_cores\":{cores:.2}}}",
        rank(50),
        rank(99),
        late.last().copied().unwrap_or(0),
        late.len(),
        wanted.saturating_sub(late.len() as u64)
    );
    Ok(())
}
