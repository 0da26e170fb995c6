//! The input or the result of a collective or a message: a typed, owned, one-dimensional buffer.

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// The data type of the elements of a [`Buffer`].
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// 16-bit brain float.
    BF16,
    /// 16-bit IEEE float.
    F16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 8-bit unsigned integer, used for bytes and packed formats.
    U8,
}

impl DType {
    /// The list of all types. Messages between ranks encode a type as its index in this list.
    pub const ALL: [DType; 7] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the number of bytes per element.
    pub fn size_of(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }

    /// Returns whether this is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
    }

    /// Returns the lower-case name of the type, for example `"bf16"`.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// An owned one-dimensional array whose elements all have the same type.
///
/// ```
/// use burn_megatron_comm::{Buffer, DType};
///
/// let parts = [Buffer::from(vec![1.0f32, 2.0]), Buffer::from(vec![3.0f32])];
/// let whole = Buffer::concat(&parts)?;
/// assert_eq!((whole.dtype(), whole.len()), (DType::F32, 3));
/// assert_eq!(whole.slice(1..3).into_vec::<f32>(), [2.0, 3.0]);
/// assert!(whole.as_slice::<i32>().is_err());
/// # Ok::<(), burn_megatron_comm::BufferError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 16-bit brain floats.
    BF16(Vec<bf16>),
    /// 16-bit IEEE floats.
    F16(Vec<f16>),
    /// 64-bit signed integers.
    I64(Vec<i64>),
    /// 32-bit signed integers.
    I32(Vec<i32>),
    /// 8-bit unsigned integers.
    U8(Vec<u8>),
}

/// The error of a [`Buffer`] operation: the element type is wrong, or there are no buffers to concatenate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BufferError {
    /// The elements do not have the requested type.
    #[error("invalid buffer type: it holds {len} {found}, expected {expected}")]
    WrongType {
        /// The requested type.
        expected: DType,
        /// The type of the elements in the buffer.
        found: DType,
        /// The number of elements in the buffer.
        len: usize,
    },
    /// The list of buffers to concatenate is empty, so the element type of the result is unknown.
    #[error("cannot concatenate 0 buffers, because the result has no type: expected at least one")]
    NoParts,
}

mod sealed {
    pub trait Sealed {}
}

/// A type that a [`Buffer`] can hold. The trait is sealed: only the types in [`DType`] implement it.
pub trait Element: sealed::Sealed + Copy + Send + Sync + fmt::Debug + 'static {
    /// The [`DType`] of this type.
    const DTYPE: DType;
    /// Returns the elements of `buffer` as a slice, or `None` if the buffer has a different element type.
    fn view(buffer: &Buffer) -> Option<&[Self]>;
    /// Creates the buffer that holds `values`.
    fn into_buffer(values: Vec<Self>) -> Buffer;
    /// Converts `buffer` into a vector of its elements.
    ///
    /// # Errors
    /// [`BufferError::WrongType`] if the elements have a different type.
    fn from_buffer(buffer: Buffer) -> Result<Vec<Self>, BufferError>;
}

/// Runs `$body` with `$values` bound to the typed contents of a [`Buffer`].
#[doc(hidden)]
#[macro_export]
macro_rules! with_elements {
    ($buffer:expr, $values:ident => $body:expr) => {
        match $buffer {
            $crate::Buffer::F64($values) => $body,
            $crate::Buffer::F32($values) => $body,
            $crate::Buffer::BF16($values) => $body,
            $crate::Buffer::F16($values) => $body,
            $crate::Buffer::I64($values) => $body,
            $crate::Buffer::I32($values) => $body,
            $crate::Buffer::U8($values) => $body,
        }
    };
}

macro_rules! elements {
    ($($variant:ident: $type:ty),*) => {
        impl Buffer {
            /// Creates a buffer of `len` elements that are zero.
            pub fn zeros(dtype: DType, len: usize) -> Self {
                match dtype {
                    $(DType::$variant => Buffer::$variant(vec![<$type>::default(); len]),)*
                }
            }

            /// Creates an empty buffer with space for `capacity` elements.
            pub fn with_capacity(dtype: DType, capacity: usize) -> Self {
                match dtype {
                    $(DType::$variant => Buffer::$variant(Vec::with_capacity(capacity)),)*
                }
            }

            /// Returns the type of the elements.
            pub fn dtype(&self) -> DType {
                match self {
                    $(Buffer::$variant(_) => DType::$variant,)*
                }
            }
        }

        $(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: DType = DType::$variant;

            fn view(buffer: &Buffer) -> Option<&[Self]> {
                match buffer {
                    Buffer::$variant(values) => Some(values),
                    _ => None,
                }
            }

            fn into_buffer(values: Vec<Self>) -> Buffer {
                Buffer::$variant(values)
            }

            fn from_buffer(buffer: Buffer) -> Result<Vec<Self>, BufferError> {
                match buffer {
                    Buffer::$variant(values) => Ok(values),
                    other => Err(other.wrong_type(DType::$variant)),
                }
            }
        }

        impl From<Vec<$type>> for Buffer {
            fn from(values: Vec<$type>) -> Self {
                Element::into_buffer(values)
            }
        }

        impl TryFrom<Buffer> for Vec<$type> {
            type Error = BufferError;

            fn try_from(buffer: Buffer) -> Result<Self, BufferError> {
                Element::from_buffer(buffer)
            }
        }
        )*
    };
}
elements!(F64: f64, F32: f32, BF16: bf16, F16: f16, I64: i64, I32: i32, U8: u8);

impl Buffer {
    /// Creates a buffer without elements.
    pub fn empty(dtype: DType) -> Self {
        Self::with_capacity(dtype, 0)
    }

    /// Returns the number of elements in the buffer.
    pub fn len(&self) -> usize {
        with_elements!(self, values => values.len())
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements as a slice, without a copy.
    ///
    /// # Errors
    /// [`BufferError::WrongType`] if the elements have a different type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], BufferError> {
        T::view(self).ok_or_else(|| self.wrong_type(T::DTYPE))
    }

    /// Converts the buffer into a vector. Use this method if you know the element type. For example, the result of a
    /// collective has the same element type as its input.
    ///
    /// # Panics
    /// If the elements have a different type. [`Vec::try_from`] returns an error instead.
    pub fn into_vec<T: Element>(self) -> Vec<T> {
        T::from_buffer(self).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns a copy of the elements with the indices in `range`.
    ///
    /// # Panics
    /// If the end of the range exceeds the length of the buffer.
    pub fn slice(&self, range: Range<usize>) -> Buffer {
        with_elements!(self, values => values[range].to_vec().into())
    }

    /// Concatenates the buffers in `parts`.
    ///
    /// # Errors
    /// [`BufferError::NoParts`] if `parts` is empty. [`BufferError::WrongType`] if the buffers have different types.
    pub fn concat(parts: &[Buffer]) -> Result<Buffer, BufferError> {
        let first = parts.first().ok_or(BufferError::NoParts)?;
        let mut result = Self::with_capacity(first.dtype(), parts.iter().map(Buffer::len).sum());
        for part in parts {
            result.extend(part, 0..part.len())?;
        }
        Ok(result)
    }

    /// Appends the elements of `other` with the indices in `range`.
    ///
    /// # Errors
    /// [`BufferError::WrongType`] if the buffers have different types.
    ///
    /// # Panics
    /// If the end of the range exceeds the length of `other`.
    pub fn extend(&mut self, other: &Buffer, range: Range<usize>) -> Result<(), BufferError> {
        with_elements!(self, values => values.extend_from_slice(&other.as_slice()?[range]));
        Ok(())
    }

    /// Copies the elements of `other` whose indices are in `range` into this buffer, starting at index `at`.
    ///
    /// # Errors
    /// [`BufferError::WrongType`] if the buffers have different types.
    ///
    /// # Panics
    /// If the end of the range exceeds the length of `other`, or if the copied elements exceed the length of this
    /// buffer.
    pub fn write(
        &mut self,
        at: usize,
        other: &Buffer,
        range: Range<usize>,
    ) -> Result<(), BufferError> {
        let target = at..at + range.len();
        with_elements!(self, values => values[target].copy_from_slice(&other.as_slice()?[range]));
        Ok(())
    }

    /// Like [`write`](Self::write), for elements that are known to have the right type.
    pub(crate) fn copy_from(&mut self, at: usize, other: &Buffer, range: Range<usize>) {
        let written = self.write(at, other, range);
        written.expect("the buffers of one call have one type");
    }

    /// Sets the element at index `at` to NaN. Returns false if the index is out of range or if the type has no NaN.
    pub fn set_nan(&mut self, at: usize) -> bool {
        fn set<T>(values: &mut [T], at: usize, nan: T) -> bool {
            values.get_mut(at).map(|value| *value = nan).is_some()
        }
        match self {
            Buffer::F64(values) => set(values, at, f64::NAN),
            Buffer::F32(values) => set(values, at, f32::NAN),
            Buffer::BF16(values) => set(values, at, bf16::NAN),
            Buffer::F16(values) => set(values, at, f16::NAN),
            Buffer::I64(_) | Buffer::I32(_) | Buffer::U8(_) => false,
        }
    }

    /// Sets every element to zero.
    pub fn fill_zeros(&mut self) {
        with_elements!(self, values => values.fill(Default::default()));
    }

    fn wrong_type(&self, expected: DType) -> BufferError {
        BufferError::WrongType {
            expected,
            found: self.dtype(),
            len: self.len(),
        }
    }
}
