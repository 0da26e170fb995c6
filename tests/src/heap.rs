//! A heap that counts the bytes of each thread.
//!
//! The heap of the process depends on the load, since other tests allocate and free at any time. A measurement
//! therefore counts only the allocations of its ranks' threads. [`on_ranks`] starts ranks that have no other threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_megatron::comm::{Rank, World};
use burn_megatron_verify::memory_report::heap::is_counted;

/// An error of a rank.
pub type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Runs `f` on each rank of a world, with a count of the rank's allocations. A rank computes on one thread,
/// independent of the number of cores.
///
/// # Panics
///
/// Panics if a rank fails.
pub fn on_ranks<T: Send>(
    ranks: usize,
    f: impl Fn(Rank, ThreadHeap) -> Result<T, RankError> + Sync,
) -> Vec<T> {
    let world = World::threads(ranks).expect("the number of ranks is valid");
    let ran = world
        .compute_threads(1)
        .run(|rank| f(rank, ThreadHeap::begin()));
    ran.unwrap_or_else(|error| panic!("{error}"))
}

/// An allocator for `#[global_allocator]` that counts allocated bytes by the allocating thread. The thread that frees
/// the memory does not matter. Like [`HeapCounter`](burn_megatron_verify::memory_report::HeapCounter), it does not
/// count the buffers in which matrices are packed.
pub struct CountingAllocator<A = System>(pub A);

/// The number of allocated bytes.
struct Count {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Count {
    const fn new() -> Self {
        Self {
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        }
    }

    fn add(&self, bytes: usize) {
        let before = self.live.fetch_add(bytes, Ordering::Relaxed);
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The maximum number of owners. Threads without a [`ThreadHeap`] are counted together, as owner 0.
const OWNERS: usize = 1024;

static BY_OWNER: [Count; OWNERS] = [const { Count::new() }; OWNERS];
static OWNERS_SO_FAR: AtomicUsize = AtomicUsize::new(1);

thread_local! {
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// The bytes that a thread has allocated since it began to count, and that have not been freed.
#[derive(Clone, Copy, Debug)]
pub struct ThreadHeap(usize);

impl ThreadHeap {
    /// Counts the allocations of this thread from now on, until it begins another count.
    ///
    /// # Panics
    ///
    /// Panics in the 1024th call of a process.
    pub fn begin() -> Self {
        let owner = OWNERS_SO_FAR.fetch_add(1, Ordering::Relaxed);
        assert!(owner < OWNERS, "a process has at most {OWNERS} counts");
        OWNER.set(owner);
        Self(owner)
    }

    /// Returns the number of allocated bytes.
    pub fn live(self) -> usize {
        BY_OWNER[self.0].live.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of allocated bytes since [`reset_peak`](Self::reset_peak).
    pub fn peak(self) -> usize {
        BY_OWNER[self.0].peak.load(Ordering::Relaxed)
    }

    /// Resets the peak to the number of bytes that are allocated now.
    pub fn reset_peak(self) {
        BY_OWNER[self.0].peak.store(self.live(), Ordering::Relaxed);
    }
}

/// Returns the layout with a header before the allocation, and the size of the header. The header is as large as its
/// alignment, and at least one word.
fn with_header(layout: Layout) -> Option<(Layout, usize)> {
    let header = layout.align().max(align_of::<usize>());
    let size = layout.size().checked_add(header)?;
    Layout::from_size_align(size, header)
        .ok()
        .map(|layout| (layout, header))
}

// SAFETY: the returned pointer lies one header behind the start of a piece of the inner allocator, and has the
// alignment of the header. The word before it is the owner. It is written at allocation and read once, when the
// memory is freed. Memory that is not counted has no header.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_counted(layout) {
            return unsafe { self.0.alloc(layout) };
        }
        let Some((with_header, header)) = with_header(layout) else {
            return std::ptr::null_mut();
        };
        let piece = unsafe { self.0.alloc(with_header) };
        if piece.is_null() {
            return piece;
        }
        let owner = OWNER.try_with(Cell::get).unwrap_or(0);
        BY_OWNER[owner].add(layout.size());
        unsafe {
            let pointer = piece.add(header);
            pointer.cast::<usize>().sub(1).write(owner);
            pointer
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if !is_counted(layout) {
            return unsafe { self.0.dealloc(pointer, layout) };
        }
        let Some((with_header, header)) = with_header(layout) else {
            return;
        };
        unsafe {
            let owner = pointer.cast::<usize>().sub(1).read();
            BY_OWNER[owner].subtract(layout.size());
            self.0.dealloc(pointer.sub(header), with_header);
        }
    }
}
