//! A heap that counts the bytes of each thread.
//!
//! The heap of the process depends on the load: other tests allocate and free at any time. So a measurement counts what the
//! threads of its ranks allocate, and [`on_ranks`] starts ranks that have no other threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_megatron::comm::{Rank, World};
use burn_megatron_verify::memory_report::heap::is_counted;

/// An error of a rank.
pub type RankError = Box<dyn std::error::Error + Send + Sync>;

/// Runs `f` on each rank of a world, with a count of what the rank allocates. A rank computes on one thread, whatever the
/// number of cores is.
///
/// # Panics
///
/// If a rank fails.
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

/// An allocator that counts allocated bytes by the thread that allocated them, wherever they are freed. For
/// An allocator for `#[global_allocator]`. Like [`HeapCounter`](burn_megatron_verify::memory_report::HeapCounter), it does not
/// count the buffers in which matrices are packed.
pub struct CountingAllocator<A = System>(pub A);

/// The bytes that are allocated.
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

/// The maximum number of owners. The threads that begin no [`ThreadHeap`] are counted together, as owner 0.
const OWNERS: usize = 1024;

static BY_OWNER: [Count; OWNERS] = [const { Count::new() }; OWNERS];
static OWNERS_SO_FAR: AtomicUsize = AtomicUsize::new(1);

thread_local! {
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// The bytes that a thread has allocated since it began to count them, and that are not freed.
#[derive(Clone, Copy, Debug)]
pub struct ThreadHeap(usize);

impl ThreadHeap {
    /// Counts what this thread allocates from now on, or until it begins another count.
    ///
    /// # Panics
    ///
    /// In the 1024th call of a process.
    pub fn begin() -> Self {
        let owner = OWNERS_SO_FAR.fetch_add(1, Ordering::Relaxed);
        assert!(owner < OWNERS, "a process has at most {OWNERS} counts");
        OWNER.set(owner);
        Self(owner)
    }

    /// The bytes that are allocated.
    pub fn live(self) -> usize {
        BY_OWNER[self.0].live.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of allocated bytes since [`reset_peak`](Self::reset_peak).
    pub fn peak(self) -> usize {
        BY_OWNER[self.0].peak.load(Ordering::Relaxed)
    }

    /// Resets the peak to the bytes that are allocated now.
    pub fn reset_peak(self) {
        BY_OWNER[self.0].peak.store(self.live(), Ordering::Relaxed);
    }
}

/// The layout with a header of one word before it, as large as its alignment, and the size of that header.
fn with_header(layout: Layout) -> Option<(Layout, usize)> {
    let header = layout.align().max(align_of::<usize>());
    let size = layout.size().checked_add(header)?;
    Layout::from_size_align(size, header)
        .ok()
        .map(|layout| (layout, header))
}

// SAFETY: what is returned lies one header into a piece of the inner allocator, aligned as the header is; the word before
// it is the owner, written at allocation and read once, when it is freed. Memory that is not counted has no header.
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
