// The one place that names the view library.
export {
  html, render, Component, createContext,
  useCallback, useContext, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "../../vendor/htm-preact.js";

let count = 0;

/** A new id for an element, so that labels and descriptions can point to it. */
export const newId = (prefix = "id") => `${prefix}-${++count}`;

/** Joins the class names that are not empty. @param {...(string|false|null|undefined)} names */
export const classes = (...names) => names.filter(Boolean).join(" ");
