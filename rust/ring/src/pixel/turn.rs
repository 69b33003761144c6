//! Crops and quarter turns.

use crate::error::{Result, argument};

/// Part of the picture to take, in pixels of the displayed (rotated) picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crop {
    /// First row.
    pub top: usize,
    /// First column.
    pub left: usize,
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
}

/// Quarter turns, counter-clockwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// As stored.
    None,
    /// 90 degrees.
    Quarter,
    /// 180 degrees.
    Half,
    /// 270 degrees.
    ThreeQuarter,
}

impl Rotation {
    /// From degrees counter-clockwise; multiples of 90.
    pub fn from_degrees(degrees: i32) -> Result<Self> {
        match degrees.rem_euclid(360) {
            0 => Ok(Self::None),
            90 => Ok(Self::Quarter),
            180 => Ok(Self::Half),
            270 => Ok(Self::ThreeQuarter),
            _ => Err(argument("rotation", degrees, "a multiple of 90 degrees")),
        }
    }

    pub(super) fn swaps(self) -> bool {
        matches!(self, Self::Quarter | Self::ThreeQuarter)
    }
}

/// Maps a crop of the displayed picture to the stored one.
pub(super) fn unrotate(crop: Crop, rotation: Rotation, shown_h: usize, shown_w: usize) -> Crop {
    let bottom = shown_h - crop.top - crop.height;
    let right = shown_w - crop.left - crop.width;
    match rotation {
        Rotation::None => crop,
        Rotation::Half => Crop {
            top: bottom,
            left: right,
            ..crop
        },
        Rotation::Quarter => Crop {
            top: crop.left,
            left: bottom,
            height: crop.width,
            width: crop.height,
        },
        Rotation::ThreeQuarter => Crop {
            top: right,
            left: crop.top,
            height: crop.width,
            width: crop.height,
        },
    }
}

/// Turns a picture of `size` = (height, width) counter-clockwise.
pub(super) fn rotate(source: &[u8], size: (usize, usize), rotation: Rotation, out: &mut [u8]) {
    let (height, width) = size;
    let out_width = if rotation.swaps() { height } else { width };
    for (index, pixel) in out.chunks_exact_mut(3).enumerate() {
        let (y, x) = (index / out_width, index % out_width);
        let (sy, sx) = match rotation {
            Rotation::None => (y, x),
            Rotation::Half => (height - 1 - y, width - 1 - x),
            Rotation::Quarter => (x, width - 1 - y),
            Rotation::ThreeQuarter => (height - 1 - x, y),
        };
        let at = (sy * width + sx) * 3;
        pixel.copy_from_slice(&source[at..at + 3]);
    }
}
