//! A heap that counts the bytes of each rank.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An allocator that counts allocated bytes by the thread that allocated them, wherever they are freed. For
/// `#[global_allocator]`.
pub struct CountingAllocator;

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

    fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    fn reset_peak(&self) {
        self.peak.store(self.live(), Ordering::Relaxed);
    }
}

/// The most owners; threads that belong to none are counted together.
const OWNERS: usize = 16;

static BY_OWNER: [Count; OWNERS] = [const { Count::new() }; OWNERS];
static ALL: Count = Count::new();

thread_local! {
    static OWNER: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this thread allocates from now on as that of a rank.
///
/// # Panics
///
/// For more than 15 ranks.
pub fn count_as_rank(rank: usize) {
    assert!(rank + 1 < OWNERS, "rank {rank}");
    OWNER.set(rank + 1);
}

/// The bytes that a rank has allocated.
pub fn live_of(rank: usize) -> usize {
    BY_OWNER[rank + 1].live()
}

/// The most bytes that a rank had allocated since [`reset_peak_of`].
pub fn peak_of(rank: usize) -> usize {
    BY_OWNER[rank + 1].peak()
}

/// Starts the peak of a rank at what it has now.
pub fn reset_peak_of(rank: usize) {
    BY_OWNER[rank + 1].reset_peak();
}

/// The bytes that all threads have allocated.
pub fn live() -> usize {
    ALL.live()
}

/// The most bytes that all threads had allocated since [`reset_peak`].
pub fn peak() -> usize {
    ALL.peak()
}

/// Starts the peak of all threads at what they have now.
pub fn reset_peak() {
    ALL.reset_peak();
}

/// The layout with a header of one word before it, as large as its alignment, and the size of that header.
fn with_header(layout: Layout) -> Option<(Layout, usize)> {
    let header = layout.align().max(align_of::<usize>());
    let size = layout.size().checked_add(header)?;
    Layout::from_size_align(size, header)
        .ok()
        .map(|layout| (layout, header))
}

// SAFETY: what is returned lies one header into a piece of the system allocator, aligned as the header is; the word before
// it is the owner, written at allocation and read once, when it is freed.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((with_header, header)) = with_header(layout) else {
            return std::ptr::null_mut();
        };
        let piece = unsafe { System.alloc(with_header) };
        if piece.is_null() {
            return piece;
        }
        let owner = OWNER.try_with(Cell::get).unwrap_or(0);
        BY_OWNER[owner].add(layout.size());
        ALL.add(layout.size());
        unsafe {
            let pointer = piece.add(header);
            pointer.cast::<usize>().sub(1).write(owner);
            pointer
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let Some((with_header, header)) = with_header(layout) else {
            return;
        };
        unsafe {
            let owner = pointer.cast::<usize>().sub(1).read();
            BY_OWNER[owner].subtract(layout.size());
            ALL.subtract(layout.size());
            System.dealloc(pointer.sub(header), with_header);
        }
    }
}
