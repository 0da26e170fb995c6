//! Memory that stays at the same address while a transport reads or writes it. All `unsafe` code of `p2p_collectives`
//! is in this module.
//!
//! Payloads are sent directly from the caller's buffer and received directly into the result buffer. The values of this
//! module never leave the thread that owns the transport.

use std::cell::UnsafeCell;
use std::mem;
use std::ops::Range;
use std::rc::Rc;
use std::slice;

use crate::buffer::Buffer;
use crate::pool::PooledBuffer;
use crate::with_elements;

/// The elements of a buffer that are sent to one rank. The buffer returns to its pool when its last slice is dropped.
#[derive(Debug)]
pub struct SendSlice {
    source: Rc<PooledBuffer>,
    bytes: Range<usize>,
}

impl SendSlice {
    /// Creates a slice of the elements of `source` in `range`. Returns `None` if the range is empty.
    pub fn new(source: &Rc<PooledBuffer>, range: Range<usize>) -> Option<Self> {
        let width = source.dtype().size_of();
        assert!(range.end <= source.len(), "the range lies in its buffer");
        (!range.is_empty()).then(|| Self {
            source: Rc::clone(source),
            bytes: range.start * width..range.end * width,
        })
    }

    /// Returns the elements as bytes. The address of the bytes does not change.
    pub fn bytes(&self) -> &[u8] {
        let whole = with_elements!(&**self.source, values => {
            // SAFETY: the elements are plain numbers, so every byte is initialized.
            unsafe { slice::from_raw_parts(values.as_ptr().cast::<u8>(), mem::size_of_val(&values[..])) }
        });
        &whole[self.bytes.clone()]
    }
}

/// A buffer that receives elements from several ranks.
#[derive(Debug)]
pub struct ReceiveBuffer(Rc<UnsafeCell<PooledBuffer>>);

/// The part of a [`ReceiveBuffer`] that receives the elements from one rank.
#[derive(Debug)]
pub struct ReceiveSlice {
    start: *mut u8,
    bytes: usize,
    /// A reference that keeps the memory alive.
    _landing: Rc<UnsafeCell<PooledBuffer>>,
}

impl ReceiveBuffer {
    /// Splits a buffer into slices with the given ranges of elements. The ranges must be ascending and disjoint. For an
    /// empty range, `None` is returned instead of a slice.
    pub fn split(
        mut buffer: PooledBuffer,
        slices: &[Range<usize>],
    ) -> (Self, Vec<Option<ReceiveSlice>>) {
        let (width, len) = (buffer.dtype().size_of(), buffer.len());
        let start: *mut u8 = with_elements!(&mut *buffer, values => values.as_mut_ptr().cast());
        let receive_buffer = Rc::new(UnsafeCell::new(buffer));
        let mut free = 0;
        let slice = |range: &Range<usize>| {
            if range.is_empty() {
                return None;
            }
            assert!(
                free <= range.start && range.end <= len,
                "slices are disjoint"
            );
            free = range.end;
            Some(ReceiveSlice {
                // SAFETY: the assertion has checked that the range lies in the buffer.
                start: unsafe { start.add(range.start * width) },
                bytes: range.len() * width,
                _landing: Rc::clone(&receive_buffer),
            })
        };
        let slices = slices.iter().map(slice).collect();
        (Self(receive_buffer), slices)
    }

    /// Creates a receive buffer with a single slice.
    pub fn single(buffer: PooledBuffer, slice: Range<usize>) -> (Self, Option<ReceiveSlice>) {
        let (receive_buffer, mut slices) = Self::split(buffer, slice::from_ref(&slice));
        (receive_buffer, slices.pop().flatten())
    }

    /// Returns the buffer. All slices must have been dropped before.
    ///
    /// # Panics
    /// If a slice is still alive.
    pub fn into_inner(self) -> PooledBuffer {
        let memory = Rc::try_unwrap(self.0).expect("all slices of a receive buffer are dropped");
        memory.into_inner()
    }
}

impl ReceiveSlice {
    /// Returns the size of the slice in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the slice. While this value exists, the bytes are valid and nothing else accesses them.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "used by MPI"))]
    pub fn address(&self) -> *mut u8 {
        self.start
    }

    /// Copies `bytes` into the slice and drops the slice.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn fill(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes, "the payload fits its slice");
        // SAFETY: no other slice overlaps this slice. The buffer itself is inaccessible until `into_inner`, which
        // requires that this slice has been dropped. Every bit pattern is a valid number.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }.copy_from_slice(bytes);
    }
}

/// Removes the buffer from the control of its pool, so that it does not return to the pool.
pub fn detach(mut lent: PooledBuffer) -> Buffer {
    let empty = Buffer::empty(lent.dtype());
    mem::replace(&mut *lent, empty)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{BufferPool, DType};

    fn lent(buffer: Buffer, pool: &Arc<BufferPool>) -> PooledBuffer {
        PooledBuffer::new(buffer, pool)
    }

    #[test]
    fn what_goes_out_comes_in_at_its_place() {
        let pool = Arc::default();
        let source = Rc::new(lent(vec![1i32, 2, 3, 4].into(), &pool));
        let (receive_buffer, slices) =
            ReceiveBuffer::split(lent(vec![0i32; 5].into(), &pool), &[0..2, 2..2, 3..5]);
        let mut slices = slices.into_iter();
        let first = slices.next().flatten().unwrap();
        assert!(slices.next().unwrap().is_none());
        let last = slices.next().flatten().unwrap();
        assert_eq!((first.len(), last.len()), (8, 8));
        last.fill(SendSlice::new(&source, 0..2).unwrap().bytes());
        first.fill(SendSlice::new(&source, 2..4).unwrap().bytes());
        assert!(SendSlice::new(&source, 4..4).is_none());
        assert_eq!(
            detach(receive_buffer.into_inner()),
            vec![3i32, 4, 0, 1, 2].into()
        );
    }

    #[test]
    fn memory_goes_home_with_its_last_user() {
        let pool = Arc::<BufferPool>::default();
        let source = Rc::new(lent(pool.take(DType::F32, 2048), &pool));
        let outgoing = SendSlice::new(&source, 0..1);
        drop(source);
        assert_eq!(pool.free_bytes(), 0);
        drop(outgoing);
        assert_eq!(pool.free_bytes(), 8192);
        let (receive_buffer, slice) =
            ReceiveBuffer::single(lent(pool.take(DType::F32, 2048), &pool), 0..4);
        drop(receive_buffer);
        assert_eq!(pool.free_bytes(), 0);
        drop(slice);
        assert_eq!(pool.free_bytes(), 8192);
    }

    #[test]
    #[should_panic(expected = "slices are disjoint")]
    fn places_that_overlap_are_refused() {
        let pool = Arc::default();
        ReceiveBuffer::split(lent(vec![0u8; 4].into(), &pool), &[0..3, 2..4]);
    }

    #[test]
    #[should_panic(expected = "slices of a receive buffer are dropped")]
    fn a_landing_with_an_open_place_is_not_closed() {
        let pool = Arc::default();
        let (receive_buffer, _place) =
            ReceiveBuffer::single(lent(vec![0u8; 4].into(), &pool), 0..3);
        receive_buffer.into_inner();
    }
}
