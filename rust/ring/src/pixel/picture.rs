//! Decoded pictures: planes of samples, checked against their layout.

use super::MAX_SIDE;
use super::line::Rows;
use crate::error::{Error, Result, argument};

/// How samples are arranged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Picture width in pixels.
    pub width: usize,
    /// Picture height in pixels.
    pub height: usize,
    /// Bits per sample, 8 to 16.
    pub depth: u32,
    /// Log2 of luma columns per chroma sample; 0 or 1.
    pub shift_x: u32,
    /// Log2 of luma rows per chroma sample; 0 or 1.
    pub shift_y: u32,
    /// False for pictures without chroma.
    pub has_chroma: bool,
}

/// A decoded picture.
#[derive(Debug, Clone, Copy)]
pub struct Picture<'a> {
    pub(super) layout: Layout,
    pub(super) planes: [Option<Rows<'a>>; 3],
}

impl<'a> Picture<'a> {
    /// Checks planes `(bytes, stride)` against the layout: one plane without chroma, else three.
    pub fn new(layout: Layout, planes: &[(&'a [u8], usize)]) -> Result<Self> {
        let allowed = format!("1 to {MAX_SIDE}");
        for (name, side) in [("width", layout.width), ("height", layout.height)] {
            if side == 0 || side > MAX_SIDE {
                return Err(argument(name, side, allowed));
            }
        }
        if !(8..=16).contains(&layout.depth) {
            return Err(argument("depth", layout.depth, "8 to 16 bits"));
        }
        if layout.shift_x > 1 || layout.shift_y > 1 {
            return Err(argument(
                "chroma shift",
                format!("{} x {}", layout.shift_x, layout.shift_y),
                "0 or 1",
            ));
        }
        let wanted = if layout.has_chroma { 3 } else { 1 };
        if planes.len() != wanted {
            return Err(argument(
                "number of planes",
                planes.len(),
                wanted.to_string(),
            ));
        }
        let mut rows = [None; 3];
        for (plane, (data, stride)) in planes.iter().enumerate() {
            let (width, height) = if plane == 0 {
                (layout.width, layout.height)
            } else {
                (
                    layout.width.div_ceil(1 << layout.shift_x),
                    layout.height.div_ceil(1 << layout.shift_y),
                )
            };
            let found = Rows::new(data, *stride, width, height, layout.depth);
            rows[plane] = Some(found.ok_or(Error::Plane {
                plane,
                actual: data.len(),
                width,
                height,
                stride: *stride,
            })?);
        }
        Ok(Self {
            layout,
            planes: rows,
        })
    }
}
