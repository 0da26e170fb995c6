//! A fake device in host memory, with concurrent streams.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::super::driver::{Allocation, DeviceDriver, Event, Priority, Stream};
use super::random::Rng;

type Task = Box<dyn FnOnce() + Send>;

/// The allocations, keyed by address. Each allocation has contents and a number.
type Allocations = HashMap<u64, (Vec<u8>, usize)>;

/// A fake device. Handles are the addresses of leaked objects, which is acceptable in tests.
#[derive(Debug, Default)]
pub struct FakeDevice {
    memory: Arc<Mutex<Allocations>>,
    pub allocated: AtomicUsize,
    /// The number of high-priority streams.
    pub high_priority: AtomicUsize,
}

/// A thread that runs tasks in order until it is closed.
pub struct FakeStream(Mutex<Option<Sender<Task>>>);

/// A thread that runs tasks after a delay. All tests share this thread, because some tests count the threads of the
/// process.
pub struct DelayedTasks(Duration, Mutex<Sender<(Instant, Task)>>);

impl DelayedTasks {
    pub fn new(delay: Duration) -> Self {
        let (sender, tasks) = mpsc::channel::<(Instant, Task)>();
        thread::spawn(move || {
            for (at, task) in tasks {
                thread::sleep(at.saturating_duration_since(Instant::now()));
                task();
            }
        });
        Self(delay, Mutex::new(sender))
    }

    pub fn put(&self, task: impl FnOnce() + Send + 'static) {
        if let Some(delay) = random_delay() {
            thread::spawn(move || {
                thread::sleep(delay);
                task();
            });
            return;
        }
        let tasks = self.1.lock().unwrap();
        tasks
            .send((Instant::now() + self.0, Box::new(task)))
            .unwrap();
    }
}

/// The state of the random number generator for delays, or 0 if delays are not random.
static RANDOM: AtomicU64 = AtomicU64::new(0);

/// Delays each task by a random time of up to one millisecond, so that tasks overtake each other.
pub fn delay_at_random(seed: Option<u64>) {
    RANDOM.store(seed.map_or(0, |seed| (seed << 32) + 1), Ordering::SeqCst);
}

fn random_delay() -> Option<Duration> {
    match RANDOM.load(Ordering::SeqCst) {
        0 => None,
        _ => {
            let mut rng = Rng(RANDOM.fetch_add(1, Ordering::SeqCst));
            Some(Duration::from_micros(rng.below(1000) as u64))
        }
    }
}

#[derive(Default)]
struct FakeEvent {
    recorded: AtomicU64,
    passed: Mutex<u64>,
    condvar: Condvar,
}

impl FakeStream {
    pub fn of(raw: usize) -> &'static Self {
        // SAFETY: created by `stream` below and never freed.
        unsafe { &*(raw as *const Self) }
    }

    pub fn put(&self, task: impl FnOnce() + Send + 'static) {
        match &*self.0.lock().unwrap() {
            Some(tasks) => tasks.send(Box::new(task)).unwrap(),
            None => task(),
        }
    }

    /// Runs a task on the stream and waits for it.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        let (done, ended) = mpsc::channel();
        self.put(move || {
            task();
            done.send(()).unwrap();
        });
        ended.recv().unwrap();
    }
}

impl FakeEvent {
    fn of(event: Event) -> &'static Self {
        // SAFETY: created by `event` below and never freed.
        unsafe { &*(event.0 as *const Self) }
    }
}

impl FakeDevice {
    /// Returns the number of allocations that have not been freed.
    pub fn held(&self) -> usize {
        self.memory.lock().unwrap().len()
    }
}

impl DeviceDriver for FakeDevice {
    fn name(&self) -> String {
        "fake:0".into()
    }

    fn make_current(&self) -> Result<(), String> {
        Ok(())
    }

    fn ignore_captures(&self) -> Result<(), String> {
        Ok(())
    }

    fn multiprocessors(&self) -> Result<usize, String> {
        Ok(132)
    }

    fn create_stream(&self, priority: Priority) -> Result<Stream, String> {
        let is_high = priority == Priority::High;
        self.high_priority
            .fetch_add(is_high.into(), Ordering::SeqCst);
        let (sender, tasks) = mpsc::channel::<Task>();
        thread::spawn(move || tasks.into_iter().for_each(|task| task()));
        let stream = Box::leak(Box::new(FakeStream(Mutex::new(Some(sender)))));
        Ok(Stream(stream as *const _ as usize))
    }

    fn destroy_stream(&self, stream: Stream) {
        FakeStream::of(stream.0).0.lock().unwrap().take();
    }

    fn create_event(&self) -> Result<Event, String> {
        let event: &'static FakeEvent = Box::leak(Box::default());
        Ok(Event(event as *const _ as usize))
    }

    fn destroy_event(&self, _event: Event) {}

    fn record(&self, event: Event, stream: Stream) -> Result<(), String> {
        let event = FakeEvent::of(event);
        let number = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        FakeStream::of(stream.0).put(move || {
            *event.passed.lock().unwrap() = number;
            event.condvar.notify_all();
        });
        Ok(())
    }

    /// A wait for an event that was never recorded returns immediately, as on a real device.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<(), String> {
        let event = FakeEvent::of(event);
        let number = event.recorded.load(Ordering::SeqCst);
        FakeStream::of(stream.0).put(move || {
            let mut passed = event.passed.lock().unwrap();
            while *passed < number {
                passed = event.condvar.wait(passed).unwrap();
            }
        });
        Ok(())
    }

    fn query_event(&self, event: Event) -> Result<bool, String> {
        let event = FakeEvent::of(event);
        Ok(*event.passed.lock().unwrap() >= event.recorded.load(Ordering::SeqCst))
    }

    fn allocate(&self, bytes: usize, _stream: Stream) -> Result<u64, String> {
        let id = self.allocated.fetch_add(1, Ordering::SeqCst);
        let memory = vec![0xa5u8; bytes];
        let address = memory.as_ptr() as u64;
        let mut all = self.memory.lock().unwrap();
        all.insert(address, (memory, id));
        Ok(address)
    }

    fn allocation(&self, address: u64) -> Result<Allocation, String> {
        let all = self.memory.lock().unwrap();
        let holds = |(start, (memory, _)): &(&u64, &(Vec<u8>, usize))| {
            (**start..**start + memory.len() as u64).contains(&address)
        };
        let found = all.iter().find(holds).ok_or("nothing is allocated there");
        let (start, (memory, id)) = found?;
        Ok(Allocation {
            address: *start,
            bytes: memory.len(),
            id: *id as u64,
        })
    }

    fn free(&self, address: u64, stream: Stream) {
        let memory = self.memory.clone();
        FakeStream::of(stream.0).put(move || {
            let (mut freed, _) = memory.lock().unwrap().remove(&address).unwrap();
            freed.fill(0x5a);
        });
    }

    unsafe fn copy_to_device(&self, to: u64, from: &[u8], stream: Stream) -> Result<(), String> {
        let from = from.to_vec();
        FakeStream::of(stream.0).run(move || unsafe { write(to, &from) });
        Ok(())
    }

    unsafe fn copy_to_host(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<(), String> {
        let (to, len) = (to.as_mut_ptr() as u64, to.len());
        FakeStream::of(stream.0).run(move || unsafe { write(to, read(from, len)) });
        Ok(())
    }

    unsafe fn copy_on_device(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Stream,
    ) -> Result<(), String> {
        FakeStream::of(stream.0).put(move || unsafe { write(to, read(from, bytes)) });
        Ok(())
    }
}

/// Reads memory of the device.
///
/// # Safety
/// `from` must be valid for `bytes` bytes.
pub unsafe fn read<'a>(from: u64, bytes: usize) -> &'a [u8] {
    match bytes {
        0 => &[],
        // SAFETY: guaranteed by the caller.
        _ => unsafe { std::slice::from_raw_parts(from as *const u8, bytes) },
    }
}

/// Writes memory of the device.
///
/// # Safety
/// `to` must have room for `bytes`.
pub unsafe fn write(to: u64, bytes: &[u8]) {
    // SAFETY: guaranteed by the caller.
    unsafe { std::ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) }
}
