//! Memory that is used again: what a rank's calls are made in.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::buffer::{Buffer, DType};

/// Buffers of fewer elements are not pooled: an allocation costs less than the search.
pub const LEAST_POOLED: usize = 1024;

/// The communication buffers of one rank, kept for the next call of the same type and length.
///
/// Whoever has [taken](Self::take) a buffer may [give](Self::give) it back, as an engine does with the
/// inputs of its calls. For each type and length the pool counts the buffers that are out, and keeps
/// what comes back only while one is: it never holds more than were taken. Any buffer may come back for
/// another one of its type and length; what never comes back stays counted as out.
///
/// All methods may be called from any thread.
#[derive(Default)]
pub struct BufferPool {
    shelves: Mutex<HashMap<(DType, usize), Shelf>>,
    allocated: AtomicU64,
    allocated_bytes: AtomicU64,
}

/// The buffers of one type and length.
#[derive(Default)]
struct Shelf {
    free: Vec<Buffer>,
    out: usize,
}

impl BufferPool {
    /// An empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer of `len` elements with whatever they held last; zeros if it is new.
    pub fn take(&self, dtype: DType, len: usize) -> Buffer {
        self.draw(dtype, len)
            .unwrap_or_else(|| Buffer::zeros(dtype, len))
    }

    /// A buffer of `len` zeros.
    pub fn take_zeroed(&self, dtype: DType, len: usize) -> Buffer {
        match self.draw(dtype, len) {
            None => Buffer::zeros(dtype, len),
            Some(mut used) => {
                used.fill_zeros();
                used
            }
        }
    }

    /// Takes a buffer back. It is freed if none of its type and length is out, or if it has fewer than
    /// [`LEAST_POOLED`] elements.
    pub fn give(&self, buffer: Buffer) {
        if buffer.len() < LEAST_POOLED {
            return;
        }
        let mut shelves = self.shelves();
        if let Entry::Occupied(mut shelf) = shelves.entry((buffer.dtype(), buffer.len()))
            && shelf.get().out > 0
        {
            let shelf = shelf.get_mut();
            shelf.out -= 1;
            shelf.free.push(buffer);
        } else {
            // What is freed is freed outside of the lock.
            drop(shelves);
        }
    }

    /// Frees what lies in the pool unused, and forgets what is out.
    pub fn trim(&self) {
        let shelves = std::mem::take(&mut *self.shelves());
        drop(shelves);
    }

    /// The number of buffers that were ever allocated, of [`LEAST_POOLED`] elements or more.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// The bytes of the buffers that were ever [allocated](Self::allocated).
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    /// The bytes that lie in the pool unused.
    pub fn free_bytes(&self) -> u64 {
        let bytes = |((dtype, len), shelf): (&(DType, usize), &Shelf)| {
            (dtype.size_of() * len * shelf.free.len()) as u64
        };
        self.shelves().iter().map(bytes).sum()
    }

    /// A used buffer, if one is free; else one that the caller allocates.
    fn draw(&self, dtype: DType, len: usize) -> Option<Buffer> {
        if len < LEAST_POOLED {
            return None;
        }
        let mut shelves = self.shelves();
        let shelf = shelves.entry((dtype, len)).or_default();
        shelf.out += 1;
        let used = shelf.free.pop();
        drop(shelves);
        if used.is_none() {
            let bytes = (dtype.size_of() * len) as u64;
            self.allocated.fetch_add(1, Ordering::Relaxed);
            self.allocated_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        used
    }

    /// No code that can panic leaves the shelves half done.
    fn shelves(&self) -> MutexGuard<'_, HashMap<(DType, usize), Shelf>> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("allocated", &self.allocated())
            .field("allocated_bytes", &self.allocated_bytes())
            .field("free_bytes", &self.free_bytes())
            .finish()
    }
}

/// A buffer that goes home to its pool when it is dropped.
#[derive(Debug)]
pub(super) struct Lent {
    buffer: Buffer,
    home: Arc<BufferPool>,
}

impl Lent {
    pub fn new(buffer: Buffer, home: &Arc<BufferPool>) -> Self {
        Self {
            buffer,
            home: Arc::clone(home),
        }
    }
}

impl Deref for Lent {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let empty = Buffer::empty(self.buffer.dtype());
        self.home.give(std::mem::replace(&mut self.buffer, empty));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_is_kept_and_used_again() {
        let pool = BufferPool::new();
        let mut first = pool.take(DType::F32, 2000);
        assert_eq!(first, Buffer::zeros(DType::F32, 2000));
        assert_eq!((pool.allocated(), pool.allocated_bytes()), (1, 8000));
        first.write(0, &vec![5f32].into(), 0..1).unwrap();
        let kept = first.clone();
        pool.give(first);
        assert_eq!(pool.free_bytes(), 8000);
        assert_eq!(pool.take(DType::F32, 2000), kept);
        assert_eq!((pool.allocated(), pool.free_bytes()), (1, 0));
        // Neither another length nor another type will do.
        let _ = (pool.take(DType::F32, 2001), pool.take(DType::BF16, 2000));
        assert_eq!((pool.allocated(), pool.allocated_bytes()), (3, 20_004));
    }

    #[test]
    fn zeros_are_zeros_again() {
        let pool = BufferPool::new();
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            let mut used = pool.take_zeroed(dtype, 1024);
            let ones = match dtype {
                DType::F32 => vec![1f32; 1024].into(),
                DType::BF16 => vec![half::bf16::ONE; 1024].into(),
                _ => Buffer::from(vec![1u8; 1024]),
            };
            used.write(0, &ones, 0..1024).unwrap();
            pool.give(used);
            assert_eq!(pool.take_zeroed(dtype, 1024), Buffer::zeros(dtype, 1024));
        }
        assert_eq!(pool.allocated(), 3);
    }

    #[test]
    fn no_more_is_kept_than_was_taken() {
        let pool = BufferPool::new();
        pool.give(vec![0f32; 5000].into());
        assert_eq!(pool.free_bytes(), 0);
        let taken = [pool.take(DType::F32, 5000), pool.take(DType::F32, 5000)];
        for buffer in taken.into_iter().chain([vec![0f32; 5000].into()]) {
            pool.give(buffer);
        }
        assert_eq!(pool.free_bytes(), 2 * 20_000);
        pool.trim();
        assert_eq!(pool.free_bytes(), 0);
    }

    #[test]
    fn small_buffers_are_not_pooled() {
        let pool = BufferPool::new();
        pool.give(pool.take(DType::F64, LEAST_POOLED - 1));
        assert_eq!((pool.allocated(), pool.free_bytes()), (0, 0));
        pool.give(pool.take(DType::F64, LEAST_POOLED));
        assert_eq!((pool.allocated(), pool.free_bytes()), (1, 8192));
    }

    #[test]
    fn what_is_lent_goes_home_also_when_a_thread_panics() {
        let pool = Arc::new(BufferPool::new());
        let lent = Lent::new(pool.take(DType::F32, 1024), &pool);
        let thread = std::thread::spawn(move || {
            let _lent = lent;
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(thread.join().is_err());
        assert_eq!(pool.free_bytes(), 4096);
        pool.give(pool.take(DType::F32, 1024));
        assert_eq!(pool.allocated(), 1);
    }
}
