//! An allocator that counts bytes, and that can record where memory was allocated.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A global allocator that counts allocated bytes and forwards to the system allocator.
/// [`memory_report`](super::memory_report) requires it on the CPU:
///
/// ```
/// use burn_megatron_verify::memory_report::HeapCounter;
///
/// #[global_allocator]
/// static HEAP: HeapCounter = HeapCounter;
/// # fn main() {}
/// ```
///
/// Counting adds two atomic operations to each allocation, and also a backtrace while a report searches for memory
/// growth. The packing buffers of matrix multiplications are [not counted](is_counted).
#[derive(Debug)]
pub struct HeapCounter;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// `NOTING`: whether allocations are recorded with their backtraces. `HAS_NOTES`: whether there may be recorded
/// allocations.
static NOTING: AtomicBool = AtomicBool::new(false);
static HAS_NOTES: AtomicBool = AtomicBool::new(false);
static NOTES: Mutex<Option<HashMap<usize, Note>>> = Mutex::new(None);

/// Allocations below this number of bytes are not recorded.
const SMALLEST_NOTE: usize = 256;

struct Note {
    bytes: usize,
    at: Backtrace,
}

thread_local! {
    /// Whether this thread is recording an allocation, which allocates memory itself.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether [`HeapCounter`] counts an allocation with this layout. The buffers in which the crate `gemm` packs
/// matrices are not counted. Their size depends on the CPU caches, and each thread that runs a matrix multiplication
/// keeps a buffer. They are recognized by their alignment: they are aligned to cache lines, while tensors need an
/// alignment of at most 16 bytes.
pub fn is_counted(layout: Layout) -> bool {
    layout.align() <= align_of::<u128>()
}

/// Returns the number of allocated bytes, or 0 if [`HeapCounter`] is not the global allocator of the program.
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// Returns the peak number of allocated bytes since [`reset_peak`].
pub fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// Resets [`peak`] to the number of bytes that are allocated now.
pub fn reset_peak() {
    PEAK.store(live(), Ordering::Relaxed);
}

/// Runs `body` and records its allocations.
pub(super) fn noting<T>(body: impl FnOnce() -> T) -> T {
    HAS_NOTES.store(true, Ordering::SeqCst);
    NOTING.store(true, Ordering::SeqCst);
    let result = body();
    NOTING.store(false, Ordering::SeqCst);
    result
}

/// Takes the recorded allocations that are not freed, as bytes and the text of a backtrace.
pub(super) fn take_notes() -> Vec<(usize, String)> {
    HAS_NOTES.store(false, Ordering::SeqCst);
    let notes = notes().take().unwrap_or_default();
    let text = |note: Note| (note.bytes, note.at.to_string());
    notes.into_values().map(text).collect()
}

fn notes() -> MutexGuard<'static, Option<HashMap<usize, Note>>> {
    NOTES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `body` unless this thread is already inside such a call.
fn outside(body: impl FnOnce()) {
    let was_inside = INSIDE
        .try_with(|inside| inside.replace(true))
        .unwrap_or(true);
    if !was_inside {
        body();
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}

// SAFETY: every call forwards to the system allocator with the same arguments.
unsafe impl GlobalAlloc for HeapCounter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let pointer = unsafe { System.alloc(layout) };
        if pointer.is_null() || !is_counted(layout) {
            return pointer;
        }
        let bytes = layout.size();
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
        PEAK.fetch_max(live, Ordering::Relaxed);
        if bytes >= SMALLEST_NOTE && NOTING.load(Ordering::Relaxed) {
            outside(|| {
                let at = Backtrace::force_capture();
                let mut notes = notes();
                let notes = notes.get_or_insert_default();
                notes.insert(pointer as usize, Note { bytes, at });
            });
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if !is_counted(layout) {
            return unsafe { System.dealloc(pointer, layout) };
        }
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        if layout.size() >= SMALLEST_NOTE && HAS_NOTES.load(Ordering::Relaxed) {
            outside(|| {
                let note = notes()
                    .as_mut()
                    .and_then(|notes| notes.remove(&(pointer as usize)));
                drop(note);
            });
        }
        unsafe { System.dealloc(pointer, layout) }
    }
}
